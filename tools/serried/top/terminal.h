// A terminal that is drawn on and given back as it was.
#pragma once

#include <signal.h>
#include <termios.h>

#include <chrono>
#include <string>
#include <vector>

#include "serried/launch/fd.h"

namespace serried::top {

struct WindowSize {
  size_t width = 80;
  size_t height = 24;
};

/// Of the terminal at `fd`; `usual` where it does not say, or is none.
WindowSize window_size(int fd, WindowSize usual = {});

/// While it lives: the alternate screen of stdout without a cursor, keys of stdin unechoed, signals as events. However
/// it ends, short of SIGKILL, the terminal is as before.
class Terminal {
 public:
  enum class Event { timeout, quit, resize, gone };

  Terminal();
  ~Terminal();
  Terminal(const Terminal&) = delete;
  Terminal& operator=(const Terminal&) = delete;

  /// Replaces what is shown in one write, line by line, so that nothing flickers. False where nobody is there to see.
  bool draw(const std::vector<std::string>& lines);

  /// Until something happens or `deadline` comes. Ctrl-Z gives the terminal back, stops, and takes it again: a resize.
  Event wait(std::chrono::steady_clock::time_point deadline);

 private:
  void take();
  void give_back();
  Event on_signal(int signal);
  Event on_key();

  launch::Fd signals_;
  sigset_t signals_before_{};
  termios keys_before_{};
  bool has_keys_ = false;
};

}  // namespace serried::top
