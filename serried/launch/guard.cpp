// The guard reads group numbers from a pipe whose end means that the launcher is gone.
#include "serried/launch/guard.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <set>
#include <string>

#include "serried/launch/error.h"

namespace serried::launch {
namespace {

// The launcher's output must end when the launcher does, so the guard holds none of its descriptors.
void let_go_of_everything_but(int pipe) {
  ::setsid();
  ::prctl(PR_SET_NAME, "serried-guard");
  sigset_t all;
  sigfillset(&all);
  ::sigprocmask(SIG_SETMASK, &all, nullptr);
  const int null = ::open("/dev/null", O_RDWR | O_CLOEXEC);
  for (int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) ::dup2(null, fd);
  if (pipe > 3) ::close_range(3, static_cast<unsigned>(pipe) - 1, 0);
  ::close_range(static_cast<unsigned>(pipe) + 1, ~0U, 0);
}

[[noreturn]] void keep_guard(int pipe) {
  let_go_of_everything_but(pipe);
  std::set<pid_t> groups;
  for (pid_t group; ::read(pipe, &group, sizeof group) == sizeof group;) {
    if (group > 0) groups.insert(group);
    if (group < 0) groups.erase(-group);
  }
  for (pid_t group : groups) ::kill(-group, SIGKILL);
  ::_exit(0);
}

}  // namespace

Guard::Guard() {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) == 0) {
    const Fd read(ends[0]);
    pipe_.reset(ends[1]);
    pid_ = ::fork();
    if (pid_ == 0) {
      ::close(pipe_.get());
      keep_guard(read.get());
    }
  }
  if (pid_ > 0) return;
  throw LaunchError(kExitFailure, std::string("cannot start a process: ") + std::strerror(errno),
                    "raise the limits of open files and processes: ulimit -n, ulimit -u");
}

Guard::~Guard() {
  pipe_.reset();
  ::waitpid(pid_, nullptr, 0);
}

void Guard::add(pid_t group) {
  [[maybe_unused]] const ssize_t count = ::write(pipe_.get(), &group, sizeof group);
}

void Guard::remove(pid_t group) {
  add(-group);
}

}  // namespace serried::launch
