// Line cutting and the one queue to the screen.
#include "serried/launch/output.h"

#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "serried/launch/error.h"

namespace serried::launch {
namespace {

constexpr size_t kMaxLine = 1 << 20;
constexpr size_t kMaxTailLine = 2000;
constexpr size_t kReadSize = 1 << 16;
constexpr int kReadsPerTurn = 16;  // one chatty rank must not starve the others
constexpr int kWritesPerTurn = 64;

bool wants_colour(int fd) {
  const char* no_color = std::getenv("NO_COLOR");
  const char* term = std::getenv("TERM");
  const bool refused = (no_color != nullptr && *no_color != 0) || (term != nullptr && std::strcmp(term, "dumb") == 0);
  return !refused && ::isatty(fd) == 1;
}

bool can_write(int fd) {
  pollfd poll_fd{.fd = fd, .events = POLLOUT, .revents = 0};
  return ::poll(&poll_fd, 1, 0) == 1;
}

}  // namespace

void LineSplitter::feed(std::string_view bytes, const Emit& emit) {
  for (size_t newline; (newline = bytes.find('\n')) != std::string_view::npos; bytes.remove_prefix(newline + 1)) {
    if (partial_.empty()) {
      emit(bytes.substr(0, newline));
      continue;
    }
    partial_.append(bytes.substr(0, newline));
    emit(partial_);
    partial_.clear();
  }
  partial_.append(bytes);
  if (partial_.size() < kMaxLine) return;
  finish(emit);
}

void LineSplitter::finish(const Emit& emit) {
  if (!partial_.empty()) emit(partial_);
  partial_.clear();
}

Screen::Screen(int out_fd, int err_fd) : fds_{out_fd, err_fd}, coloured_{wants_colour(out_fd), wants_colour(err_fd)} {}

void Screen::write(Stream stream, const std::string& text) {
  if (text.empty()) return;
  queued_bytes_ += text.size();
  if (!queue_.empty() && queue_.back().first == stream && queue_.back().second.size() < kReadSize) {
    queue_.back().second += text;
    return;
  }
  queue_.emplace_back(stream, text);
}

std::string Screen::prefix(Stream stream, int rank) const {
  const std::string text = "[rank " + std::to_string(rank) + "] ";
  if (!coloured_[static_cast<int>(stream)]) return text;
  constexpr std::array<const char*, 6> kColours = {"36", "33", "35", "32", "34", "31"};
  return std::string("\033[") + kColours[rank % kColours.size()] + "m" + text + "\033[0m";
}

void Screen::watch(std::vector<Watch>& watches) {
  if (queue_.empty()) return;
  watches.push_back({fds_[static_cast<int>(queue_.front().first)], POLLOUT, [this] { write_some(); }});
}

void Screen::write_some() {
  for (int i = 0; i < kWritesPerTurn && !queue_.empty(); ++i) {
    const auto& [stream, text] = queue_.front();
    const int fd = fds_[static_cast<int>(stream)];
    if (!can_write(fd)) return;
    // A pipe that is ready takes PIPE_BUF bytes without blocking.
    const size_t size = std::min<size_t>(text.size() - written_of_first_, PIPE_BUF);
    ssize_t count = ::write(fd, text.data() + written_of_first_, size);
    if (count < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (count < 0) {
      reader_gone_ = reader_gone_ || errno == EPIPE;
      count = static_cast<ssize_t>(text.size() - written_of_first_);  // nobody to read it: drop
    }
    written_of_first_ += static_cast<size_t>(count);
    queued_bytes_ -= static_cast<size_t>(count);
    if (written_of_first_ < text.size()) continue;
    queue_.pop_front();
    written_of_first_ = 0;
  }
}

void Screen::flush(Time deadline) {
  while (!queue_.empty() && Clock::now() < deadline) {
    std::vector<Watch> watches;
    watch(watches);
    poll_once(watches, deadline);
  }
}

RankStream::RankStream(Screen& screen, Stream stream, int rank, const RankStreamOptions& options)
    : screen_(screen), stream_(stream), prefix_(screen.prefix(stream, rank)), shown_(options.shown) {
  if (options.log_path.empty()) return;
  log_.reset(::open(options.log_path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
  if (log_) return;
  throw LaunchError(kExitUsage, "cannot write " + options.log_path + ": " + std::strerror(errno),
                    "pass a --log-dir that you may write to");
}

bool RankStream::pump(int fd) {
  std::array<char, kReadSize> buffer;
  bool open = true;
  for (int i = 0; i < kReadsPerTurn; ++i) {
    const ssize_t count = ::read(fd, buffer.data(), buffer.size());
    if (count < 0 && errno == EINTR) continue;
    if (count == 0 || (count < 0 && errno != EAGAIN)) open = false;
    if (count <= 0) break;
    const std::string_view bytes(buffer.data(), static_cast<size_t>(count));
    log(bytes);
    lines_.feed(bytes, [this](std::string_view line) { add_line(line); });
  }
  screen_.write(stream_, batch_);
  batch_.clear();
  return open;
}

void RankStream::finish() {
  lines_.finish([this](std::string_view line) { add_line(line); });
  screen_.write(stream_, batch_);
  batch_.clear();
}

void RankStream::add_line(std::string_view line) {
  if (shown_) batch_.append(prefix_).append(line).push_back('\n');
  if (stream_ != Stream::err) return;
  tail_.emplace_back(line.substr(0, kMaxTailLine));
  if (tail_.size() > kTailLines) tail_.pop_front();
}

void RankStream::log(std::string_view bytes) {
  while (log_ && !bytes.empty()) {
    const ssize_t count = ::write(log_.get(), bytes.data(), bytes.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) {
      screen_.write(Stream::err, "[run] " + prefix_ + "log file: " + std::strerror(errno) + "; no longer written\n");
      log_.reset();
      return;
    }
    bytes.remove_prefix(static_cast<size_t>(count));
  }
}

}  // namespace serried::launch
