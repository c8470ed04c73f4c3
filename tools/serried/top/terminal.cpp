// Escape sequences that every terminal of the last decades knows.
#include "tools/serried/top/terminal.h"

#include <poll.h>
#include <sys/ioctl.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace serried::top {
namespace {

constexpr const char* kEnter = "\x1b[?1049h\x1b[?25l";
constexpr const char* kLeave = "\x1b[?25h\x1b[?1049l";

bool write_all(std::string_view text) {
  while (!text.empty()) {
    const ssize_t count = ::write(STDOUT_FILENO, text.data(), text.size());
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return false;
    text.remove_prefix(size_t(count));
  }
  return true;
}

}  // namespace

WindowSize window_size(int fd, WindowSize usual) {
  winsize size{};
  if (::ioctl(fd, TIOCGWINSZ, &size) != 0 || size.ws_col == 0 || size.ws_row == 0) return usual;
  return {size.ws_col, size.ws_row};
}

Terminal::Terminal() {
  sigset_t set;
  sigemptyset(&set);
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGTSTP, SIGWINCH, SIGPIPE}) sigaddset(&set, signal);
  ::sigprocmask(SIG_BLOCK, &set, &signals_before_);
  signals_.reset(::signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK));
  has_keys_ = ::isatty(STDIN_FILENO) == 1 && ::tcgetattr(STDIN_FILENO, &keys_before_) == 0;
  take();
}

Terminal::~Terminal() {
  give_back();
  signals_.reset();
  ::sigprocmask(SIG_SETMASK, &signals_before_, nullptr);
}

void Terminal::take() {
  if (has_keys_) {
    termios keys = keys_before_;
    keys.c_lflag &= ~tcflag_t(ICANON | ECHO);  // signals of keys stay
    ::tcsetattr(STDIN_FILENO, TCSANOW, &keys);
  }
  write_all(kEnter);
}

void Terminal::give_back() {
  write_all(kLeave);
  if (has_keys_) ::tcsetattr(STDIN_FILENO, TCSANOW, &keys_before_);
}

bool Terminal::draw(const std::vector<std::string>& lines) {
  std::string text = "\x1b[H";
  for (size_t i = 0; i < lines.size(); ++i) text += (i == 0 ? "" : "\r\n") + lines[i] + "\x1b[K";
  return write_all(text + "\x1b[J");
}

Terminal::Event Terminal::on_signal(int signal) {
  if (signal == SIGWINCH) return Event::resize;
  if (signal == SIGHUP || signal == SIGPIPE) return Event::gone;
  if (signal != SIGTSTP) return Event::quit;
  give_back();
  ::kill(::getpid(), SIGSTOP);
  take();
  return Event::resize;
}

Terminal::Event Terminal::on_key() {
  char key = 0;
  const ssize_t count = ::read(STDIN_FILENO, &key, 1);
  if (count == 0 || (count < 0 && errno != EINTR && errno != EAGAIN)) return Event::gone;
  return key == 'q' || key == 'Q' ? Event::quit : Event::timeout;
}

Terminal::Event Terminal::wait(std::chrono::steady_clock::time_point deadline) {
  while (true) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now()).count();
    if (left <= 0) return Event::timeout;
    pollfd watched[2] = {{.fd = signals_.get(), .events = POLLIN, .revents = 0},
                         {.fd = has_keys_ ? STDIN_FILENO : -1, .events = POLLIN, .revents = 0}};
    if (::poll(watched, 2, int(std::min<int64_t>(left, 60'000))) <= 0) continue;
    signalfd_siginfo info{};
    if (watched[0].revents != 0 && ::read(signals_.get(), &info, sizeof info) == sizeof info) {
      return on_signal(int(info.ssi_signo));
    }
    if (watched[1].revents == 0) continue;
    if (const Event event = on_key(); event != Event::timeout) return event;
  }
}

}  // namespace serried::top
