// signalfd over the blocked signals.
#include "serried/launch/signals.h"

#include <sys/signalfd.h>

#include <cerrno>
#include <cstring>

#include "serried/launch/error.h"

namespace serried::launch {
namespace {

sigset_t handled() {
  sigset_t set;
  sigemptyset(&set);
  for (int signal : {SIGINT, SIGTERM, SIGQUIT, SIGCHLD, SIGTSTP, SIGUSR1, SIGUSR2}) sigaddset(&set, signal);
  struct sigaction hangup {};
  ::sigaction(SIGHUP, nullptr, &hangup);
  // nohup ignores SIGHUP so that the job outlives the terminal: keep it that way.
  if (hangup.sa_handler != SIG_IGN) sigaddset(&set, SIGHUP);
  return set;
}

}  // namespace

Signals::Signals() {
  // A parent that ignores SIGCHLD would hide how ranks end; one that reads our output may go away.
  ::signal(SIGCHLD, SIG_DFL);
  ::signal(SIGPIPE, SIG_IGN);
  const sigset_t set = handled();
  ::sigprocmask(SIG_BLOCK, &set, &previous_);
  fd_.reset(::signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!fd_) {
    throw LaunchError(kExitFailure, std::string("signalfd failed: ") + std::strerror(errno),
                      "raise the limit of open files: ulimit -n");
  }
}

Signals::~Signals() {
  ::sigprocmask(SIG_SETMASK, &previous_, nullptr);
}

std::vector<Caught> Signals::take() {
  std::vector<Caught> result;
  signalfd_siginfo info;
  while (::read(fd_.get(), &info, sizeof info) == sizeof info) {
    result.push_back({static_cast<int>(info.ssi_signo), static_cast<pid_t>(info.ssi_pid)});
  }
  return result;
}

bool is_ending(int signal) {
  return signal == SIGINT || signal == SIGTERM || signal == SIGHUP || signal == SIGQUIT || signal == SIGPIPE;
}

std::string signal_name(int signal) {
  const char* name = ::sigabbrev_np(signal);
  return name != nullptr ? std::string("SIG") + name : "signal " + std::to_string(signal);
}

SignalsAct::SignalsAct() {
  sigset_t none;
  sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, &previous_);
}

SignalsAct::~SignalsAct() {
  ::sigprocmask(SIG_SETMASK, &previous_, nullptr);
}

}  // namespace serried::launch
