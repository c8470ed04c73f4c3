// Drawing the line.
#include "tools/serried/progress.h"

#include <sys/ioctl.h>

#include <algorithm>
#include <cstdio>
#include <utility>

#include "serried/base/text.h"

namespace serried::tools {
namespace {

using namespace std::chrono_literals;

constexpr auto kRedraw = 100ms;
constexpr auto kNextLine = 2000ms;
constexpr size_t kUsualWidth = 80;

std::string clock_text(double seconds) {
  const auto whole = int64_t(std::min(seconds + 0.5, 360000.0));
  char text[32];
  if (whole < 3600) {
    std::snprintf(text, sizeof text, "%02d:%02d", int(whole / 60), int(whole % 60));
  } else {
    std::snprintf(text, sizeof text, "%d:%02d:%02d", int(whole / 3600), int(whole / 60 % 60), int(whole % 60));
  }
  return text;
}

size_t columns(int fd) {
  winsize size{};
  return ::ioctl(fd, TIOCGWINSZ, &size) == 0 && size.ws_col > 1 ? size.ws_col : kUsualWidth;
}

}  // namespace

std::string progress_text(std::string_view what, int64_t done, int64_t total, std::chrono::duration<double> elapsed) {
  std::string text(what);
  done = std::max<int64_t>(done, 0);
  if (total > 0) {
    done = std::min(done, total);
    char share[64];
    std::snprintf(share, sizeof share, " %lld/%lld (%d %%)", static_cast<long long>(done),
                  static_cast<long long>(total), int(100.0 * double(done) / double(total)));
    text += share;
  } else if (done > 0) {
    text.append(" ").append(std::to_string(done));
  }
  text.append(", ").append(clock_text(elapsed.count()));
  if (done > 0 && done < total) {
    text.append(", about ").append(clock_text(elapsed.count() * double(total - done) / double(done))).append(" left");
  }
  return text;
}

std::optional<Progress::Mode> Progress::mode_of(std::string_view word) {
  if (word.empty() || word == "auto") return Mode::automatic;
  if (word == "always") return Mode::always;
  if (word == "never") return Mode::never;
  return std::nullopt;
}

Progress::Progress(std::string what, int64_t total, Mode mode, int fd, std::chrono::milliseconds patience)
    : what_(std::move(what)), total_(total), fd_(fd), patience_(patience), is_terminal_(::isatty(fd) == 1) {
  if (mode == Mode::never || (mode == Mode::automatic && !is_terminal_)) return;
  drawer_ = std::jthread([this](const std::stop_token& stop) { keep_drawing(stop); });
}

Progress::~Progress() = default;  // the thread ends first

void Progress::at(int64_t done, std::string_view item) {
  if (!drawer_.joinable()) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  done_ = done;
  item_ = item;
}

void Progress::keep_drawing(const std::stop_token& stop) {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto is_over = [&] { return stop.stop_requested(); };
  if (stopped_.wait_for(lock, stop, patience_, is_over)) return;
  const auto pause = is_terminal_ ? kRedraw : kNextLine;
  do draw();
  while (!stopped_.wait_for(lock, stop, pause, is_over));
  if (is_terminal_) write("\r\x1b[K");
}

// Under the lock.
void Progress::draw() const {
  std::string text = progress_text(what_, done_, total_, Clock::now() - begin_);
  if (!item_.empty()) text += ": " + item_;
  text = detail::printable(text);                                          // what takes one column
  if (is_terminal_) text.resize(std::min(text.size(), columns(fd_) - 1));  // the last column would wrap
  write(is_terminal_ ? "\r" + text + "\x1b[K" : text + "\n");
}

// One write: what others print comes before or behind it. Whoever cannot read it misses it.
void Progress::write(const std::string& text) const {
  [[maybe_unused]] const ssize_t written = ::write(fd_, text.data(), text.size());
}

}  // namespace serried::tools
