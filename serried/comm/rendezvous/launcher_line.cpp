// Who asks sends at once and sleeps until the listening thread has the answer.
#include "serried/comm/rendezvous/launcher_line.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <stdexcept>
#include <thread>
#include <utility>

#include <c10/util/StringUtil.h>

#include "serried/base/channel/rank_line.h"
#include "serried/base/env.h"
#include "serried/base/error.h"

namespace serried::detail {
namespace {

using std::chrono::milliseconds;

bool is_unix_stream(int fd) {
  int domain = 0, type = 0;
  socklen_t size = sizeof domain;
  if (::getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &size) != 0) return false;
  size = sizeof type;
  return ::getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &size) == 0 && domain == AF_UNIX && type == SOCK_STREAM;
}

std::shared_ptr<LauncherLine> open_line() {
  const auto fd = env::maybe_integer(channel::kLineVariable);
  if (!fd) return nullptr;
  if (*fd < 0 || *fd > 1 << 30 || !is_unix_stream(int(*fd))) {
    raise<c10::ValueError>(
        {"rendezvous",
         c10::str(channel::kLineVariable, " is ", *fd, ", and this process has no socket of that number: what started ",
                  "it has closed the files of serried run"),
         c10::str("let the program inherit them (Python: close_fds=False); or unset ", channel::kLineVariable,
                  " on all ranks, which then meet at MASTER_ADDR and MASTER_PORT")});
  }
  ::unsetenv(channel::kLineVariable);
  auto line = make_shared_at_home<LauncherLine>(int(*fd));
  // Objects that a callback may use are gone by the end of the process, while the listening thread is not.
  static LauncherLine* opened = nullptr;
  opened = line.get();
  std::atexit([] { opened->silence(); });
  return line;
}

// A thread of ours takes no signals from those of the program.
std::thread without_signals(std::function<void()> work) {
  sigset_t all, before;
  sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread thread(std::move(work));
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return thread;
}

bool wait_until_ready(int fd, short events, LauncherLine::Clock::time_point deadline) {
  while (true) {
    const auto left = std::chrono::ceil<milliseconds>(deadline - LauncherLine::Clock::now()).count();
    if (left <= 0) return false;
    pollfd poll_fd{.fd = fd, .events = events, .revents = 0};
    const int count = ::poll(&poll_fd, 1, int(std::min<int64_t>(left, 3'600'000)));
    if (count > 0) return true;
    if (count < 0 && errno != EINTR) return false;
  }
}

constexpr auto kNever = LauncherLine::Clock::time_point::max();

}  // namespace

std::shared_ptr<LauncherLine> LauncherLine::of_process() {
  static std::mutex mutex;
  static auto* line = new std::shared_ptr<LauncherLine>();
  const std::lock_guard<std::mutex> lock(mutex);
  if (*line == nullptr) *line = open_line();
  return *line;
}

LauncherLine::LauncherLine(int fd) : fd_(fd), stop_(::eventfd(0, EFD_CLOEXEC)) {
  ::fcntl(fd_, F_SETFD, FD_CLOEXEC);
  ::fcntl(fd_, F_SETFL, O_NONBLOCK);
  send({"begin"}, Clock::now() + std::chrono::seconds(60));
  listener_ = without_signals([this] { listen(); });
}

LauncherLine::~LauncherLine() {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(stop_, &one, sizeof one);
  listener_.join();
  ::close(fd_);
  ::close(stop_);
}

void LauncherLine::raise_gone() const {
  raise<c10::DistNetworkError>({"store",
                                "the launcher, serried run, which keeps the store, has ended or closed the line",
                                "look at what it printed last, and start the job again"});
}

// A message that has begun is sent to its end, or the line is of no use any more.
void LauncherLine::send(const Message& message, Clock::time_point deadline) {
  const std::string bytes = channel::encode(message);
  const std::lock_guard<std::mutex> lock(sending_);
  for (size_t sent = 0; sent < bytes.size();) {
    const ssize_t count = ::send(fd_, bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL);
    if (count > 0) sent += size_t(count);
    if (count >= 0 || errno == EINTR) continue;
    if (errno == EAGAIN && wait_until_ready(fd_, POLLOUT, deadline)) continue;
    if (errno == EAGAIN && sent == 0) return;  // the launcher is stopped: the question stays without an answer
    ::shutdown(fd_, SHUT_RDWR);                // which the listening thread sees
    return;
  }
}

// Nobody answers a question that is gone, whatever ends it: memory may run out in between.
class LauncherLine::Entry {
 public:
  Entry(LauncherLine& line, Question& question) : line_(line) {
    // With the process: programs of a rank that follow each other have one line.
    id_ = c10::str(::getpid(), ".", line.next_++);
    line.open_[id_] = &question;
  }
  ~Entry() {
    const std::lock_guard<std::mutex> lock(line_.mutex_);
    line_.open_.erase(id_);
  }
  Entry(const Entry&) = delete;
  Entry& operator=(const Entry&) = delete;

  const std::string& id() const { return id_; }

 private:
  LauncherLine& line_;
  std::string id_;
};

std::optional<channel::Message> LauncherLine::ask(const Message& question, Clock::time_point deadline,
                                                  const std::atomic<bool>* ended) {
  home_.require("rendezvous");
  Question mine{.ended = ended, .answer = {}, .answered = {}};
  std::optional<Entry> entry;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (ended != nullptr && *ended) return Message{"over"};
    if (closed_) raise_gone();
    entry.emplace(*this, mine);
  }
  Message message = {"ask", entry->id()};
  message.insert(message.end(), question.begin(), question.end());
  send(message, deadline);
  std::unique_lock<std::mutex> lock(mutex_);
  const auto is_done = [&] { return mine.answer || closed_; };
  // Not wait_until with a time that clocks cannot add to.
  deadline == kNever ? mine.answered.wait(lock, is_done)
                     : static_cast<void>(mine.answered.wait_until(lock, deadline, is_done));
  const bool is_open =
      !mine.answer || mine.answer->front() == "over";  // by the launcher; "over" may be of this process
  if (!mine.answer && closed_) raise_gone();
  lock.unlock();
  if (is_open) send({"forget", entry->id()}, Clock::now() + std::chrono::seconds(1));
  entry.reset();
  return std::move(mine.answer);
}

void LauncherLine::say_elastic() {
  home_.require("rendezvous");
  send({"elastic"}, Clock::now() + std::chrono::seconds(60));
}

std::optional<RankTable> LauncherLine::newest_table() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return table_;
}

std::optional<RankTable> LauncherLine::wait_for_table(int newer_than, Clock::time_point deadline) {
  home_.require("rendezvous");
  std::unique_lock<std::mutex> lock(mutex_);
  const auto has_come = [&] { return closed_ || (table_ && table_->generation > newer_than); };
  deadline == kNever ? table_came_.wait(lock, has_come)
                     : static_cast<void>(table_came_.wait_until(lock, deadline, has_come));
  if (table_ && table_->generation > newer_than) return table_;
  if (closed_) raise_gone();
  return std::nullopt;
}

std::optional<Over> LauncherLine::newest_over() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return over_;
}

std::string LauncherLine::leader_away() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return leader_away_;
}

void LauncherLine::on_over(std::function<void(const Over&)> callback) {
  const std::lock_guard<std::mutex> lock(calling_);
  callback_ = std::move(callback);
  const std::optional<Over> over = newest_over();
  if (callback_ && over) callback_(*over);
}

void LauncherLine::on_table(std::function<void(const RankTable&)> callback) {
  const std::lock_guard<std::mutex> lock(calling_);
  table_callback_ = std::move(callback);
  const std::optional<RankTable> table = newest_table();
  if (table_callback_ && table) table_callback_(*table);
}

void LauncherLine::silence() {
  if (!home_.is_here()) return;
  on_over({});
  on_table({});
}

void LauncherLine::take(const Message& message) {
  if (message[0] == "answer" && message.size() >= 3) take_answer(message);
  if (message[0] == "table" && message.size() == 8) take_table(message);
  if (message[0] == "over" && message.size() == 3) take_over(message);
  if (message[0] == "leader" && message.size() == 2) {
    const std::lock_guard<std::mutex> lock(mutex_);
    leader_away_ = message[1];
  }
}

void LauncherLine::take_table(const Message& message) {
  const auto number = [&](size_t i) { return channel::number_in(message[i]); };
  const RankTable table{.generation = number(1),
                        .rank = number(2),
                        .world_size = number(3),
                        .local_rank = number(4),
                        .local_world_size = number(5),
                        .node_rank = number(6),
                        .num_nodes = number(7)};
  const std::lock_guard<std::mutex> calling(calling_);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    table_ = table;
    table_came_.notify_all();
  }
  if (table_callback_) table_callback_(table);
}

void LauncherLine::take_over(const Message& message) {
  const Over over{.generation = channel::number_in(message[1]), .why = message[2]};
  const std::lock_guard<std::mutex> calling(calling_);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (over_ && over_->generation >= over.generation) return;  // more were lost of the same ranks
    over_ = over;
  }
  if (callback_) callback_(over);
}

void LauncherLine::tell_ended(const std::atomic<bool>& ended) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [id, question] : open_) {
    if (question->ended != &ended) continue;
    question->answer = Message{"over"};
    question->answered.notify_one();
  }
}

void LauncherLine::take_answer(const Message& message) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = open_.find(message[1]);
  if (found == open_.end()) return;  // of a question that was forgotten
  found->second->answer.emplace(message.begin() + 2, message.end());
  found->second->answered.notify_one();
}

void LauncherLine::listen() {
  std::string bytes;
  std::string buffer(1 << 16, '\0');
  try {
    while (true) {
      pollfd both[] = {{.fd = fd_, .events = POLLIN, .revents = 0}, {.fd = stop_, .events = POLLIN, .revents = 0}};
      if (::poll(both, 2, -1) < 0 && errno != EINTR) break;
      if (both[1].revents != 0) break;
      const ssize_t count = ::recv(fd_, buffer.data(), buffer.size(), 0);
      if (count < 0 && (errno == EAGAIN || errno == EINTR)) continue;
      if (count <= 0) break;
      bytes.append(buffer, 0, size_t(count));
      for (Message message; !(message = channel::decode(bytes, channel::kMostBytes)).empty();) take(message);
    }
  } catch (const std::exception&) {  // no launcher speaks like this
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  closed_ = true;
  table_came_.notify_all();
  for (const auto& [id, question] : open_) question->answered.notify_one();
}

}  // namespace serried::detail
