// Signals as a descriptor of the event loop, so that none is lost and none interrupts.
#pragma once

#include <signal.h>

#include <string>
#include <vector>

#include "serried/launch/fd.h"

namespace serried::launch {

struct Caught {
  int signal;
  pid_t from;  // SIGCHLD: the child
};

/// While alive, the signals a launcher cares about are read from `fd` and do nothing else.
class Signals {
 public:
  Signals();
  ~Signals();
  Signals(const Signals&) = delete;
  Signals& operator=(const Signals&) = delete;

  int fd() const { return fd_.get(); }

  /// The signals that have come since the last call.
  std::vector<Caught> take();

 private:
  Fd fd_;
  sigset_t previous_;
};

/// Whether `signal` ends a job: SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGPIPE.
bool is_ending(int signal);

/// "SIGTERM"
std::string signal_name(int signal);

/// Lets signals act as if there were no `Signals` while alive: around calls that may block before any rank exists.
class SignalsAct {
 public:
  SignalsAct();
  ~SignalsAct();
  SignalsAct(const SignalsAct&) = delete;
  SignalsAct& operator=(const SignalsAct&) = delete;

 private:
  sigset_t previous_;
};

}  // namespace serried::launch
