// ssh as a child process, with a socket as its stdin.
#include "serried/launch/remote.h"

#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <cstring>

#include "serried/launch/control.h"
#include "serried/launch/error.h"
#include "serried/launch/plan.h"
#include "serried/launch/program.h"

namespace serried::launch {
namespace {

constexpr int kSshFailed = 255;

struct SocketPair {
  Fd ours;
  Fd theirs;
};

SocketPair make_sockets() {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) {
    throw LaunchError(kExitFailure, std::string("socketpair failed: ") + std::strerror(errno),
                      "raise the limit of open files: ulimit -n");
  }
  return {Fd(ends[0]), Fd(ends[1])};
}

Child start(const std::vector<std::string>& ssh, const std::string& host, const std::string& command, int input) {
  std::vector<std::string> arguments = ssh;
  // Asked for a password, ssh would wait for a terminal that several of them share.
  arguments.insert(arguments.end(), {"-o", "BatchMode=yes", host, command});
  return spawn({.path = find_program(ssh[0]),
                .arguments = arguments,
                .environment = inherited_environment(),
                .stdin_fd = input});
}

bool take_off(std::string_view& line, std::string_view front) {
  if (!line.starts_with(front)) return false;
  line.remove_prefix(front.size());
  return true;
}

}  // namespace

Remote::Remote(Host host, const std::vector<std::string>& ssh, const std::string& command, Screen& screen)
    : host_(std::move(host)), name_of_ssh_(ssh[0]), screen_(screen) {
  SocketPair sockets = make_sockets();
  child_ = start(ssh, host_.name, command, sockets.theirs.get());
  input_.emplace(std::move(sockets.ours));
}

Remote::~Remote() {
  if (ended()) return;
  kill();
  ::waitpid(child_.pid, nullptr, 0);
}

void Remote::watch(std::vector<Watch>& watches) {
  if (input_ && (input_->events() & POLLOUT) != 0)
    watches.push_back({input_->fd(), POLLOUT, [this] { input_->flush(); }});
  if (screen_.full()) return;
  if (child_.out) watches.push_back({child_.out.get(), POLLIN, [this] { pump(child_.out, Stream::out, out_); }});
  if (child_.err) watches.push_back({child_.err.get(), POLLIN, [this] { pump(child_.err, Stream::err, err_); }});
}

void Remote::tell(const Message& message) {
  if (input_) input_->send(message);
}

void Remote::kill() {
  if (!ended()) ::kill(-child_.pid, SIGKILL);
}

// Whether there may be more.
bool Remote::pump(Fd& fd, Stream stream, LineSplitter& lines) {
  std::array<char, 1 << 16> buffer;
  const ssize_t count = ::read(fd.get(), buffer.data(), buffer.size());
  if (count < 0 && (errno == EINTR || errno == EAGAIN)) return false;
  const auto hear = [&](std::string_view line) { hear_line(stream, line); };
  if (count > 0) lines.feed({buffer.data(), static_cast<size_t>(count)}, hear);
  if (count > 0) return true;
  lines.finish(hear);
  fd.reset();
  return false;
}

// Before the launcher's first word it is the login shell, or ssh, that speaks.
void Remote::hear_line(Stream stream, std::string_view line) {
  if (stream == Stream::out && version_.empty() && take_off(line, kNodeIsReady)) {
    version_ = line;
    return;
  }
  if (stream == Stream::out && port_ == 0 && take_off(line, kNodeListens)) {
    std::from_chars(line.data(), line.data() + line.size(), port_);
    return;
  }
  if (stream == Stream::err) last_words_ = line;
  const std::string who = version_.empty() ? "[" + host_.name + "] " : "";
  screen_.write(version_.empty() ? Stream::err : stream, who + std::string(line) + "\n");
}

void Remote::look() {
  int status = 0;
  if (ended() || ::waitpid(child_.pid, &status, WNOHANG) != child_.pid) return;
  let_go();
  exit_code_ = WIFEXITED(status) ? WEXITSTATUS(status) : kExitSignalBase + WTERMSIG(status);
  while (child_.out && pump(child_.out, Stream::out, out_)) {
  }
  while (child_.err && pump(child_.err, Stream::err, err_)) {
  }
}

std::optional<Remote::Failure> Remote::failure() const {
  if (!ended() || (*exit_code_ != kSshFailed && !version_.empty())) return std::nullopt;
  const std::string try_it = name_of_ssh_ + " " + host_.name + " true";
  const auto says = [&](const char* words) { return last_words_.find(words) != last_words_.npos; };
  const std::string end =
      " ended with code " + std::to_string(*exit_code_) + (last_words_.empty() ? "" : ": " + last_words_);
  if (*exit_code_ != kSshFailed) {
    return Failure{"no launcher began on " + host_.name + ": the command there" + end,
                   "serried and this folder have to be at the same place on every host"};
  }
  const std::string what = name_of_ssh_ + " to " + host_.name + end;
  if (says("Permission denied")) {
    return Failure{what, "it asks for a password, or knows no key of yours: let " + try_it +
                             " work without a question, by ssh-copy-id or ssh-agent"};
  }
  if (says("Host key verification failed")) return Failure{what, "accept that host's key once, by hand: " + try_it};
  return Failure{what, "see why this does not work: " + try_it};
}

}  // namespace serried::launch
