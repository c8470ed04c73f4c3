// The guard reads group numbers from a pipe whose end, without a zero before it, means that the launcher was killed.
#include "serried/launch/guard.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <set>
#include <string>

#include "serried/launch/error.h"
#include "serried/launch/orphans.h"

namespace serried::launch {
namespace {

constexpr pid_t kPeace = 0;

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

// A guard within a rank of another job must outlive its launcher, so that job's guard must not know it.
void take_off_marks() {
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    if (std::string_view(*entry).starts_with("TORCHELASTIC_RUN_ID=")) std::memset(*entry, 0, std::strlen(*entry));
  }
}

// Whether `process` carried the mark and still ran. Its number cannot pass to another process before the signal is
// sent.
bool kill_if_marked(pid_t process, const std::vector<std::string>& mark) {
  const Fd handle(static_cast<int>(::syscall(SYS_pidfd_open, process, 0)));
  return handle && carries(process, mark) && ::syscall(SYS_pidfd_send_signal, handle.get(), SIGKILL, nullptr, 0) == 0;
}

// Until none is found: a process may start another one before it dies. Those stuck in a file system are not waited for.
void kill_marked(const std::vector<std::string>& mark) {
  const timespec pause{.tv_sec = 0, .tv_nsec = 1'000'000};
  bool found = true;
  for (int i = 0; found && i < 1000; ++i) {
    found = false;
    std::error_code gone;
    for (const auto& entry : std::filesystem::directory_iterator("/proc", gone)) {
      const pid_t process = std::atoi(entry.path().filename().c_str());
      found = (process > 0 && kill_if_marked(process, mark)) || found;
    }
    ::nanosleep(&pause, nullptr);
  }
}

[[noreturn]] void keep_guard(int pipe, const std::vector<std::string>& mark) {
  take_off_marks();
  let_go_of_everything_but(pipe);
  std::set<pid_t> groups;
  for (pid_t group; ::read(pipe, &group, sizeof group) == sizeof group;) {
    if (group == kPeace) ::_exit(0);
    if (group > 0) groups.insert(group);
    if (group < 0) groups.erase(-group);
  }
  for (pid_t group : groups) ::kill(-group, SIGKILL);
  kill_marked(mark);
  ::_exit(0);
}

}  // namespace

Guard::Guard(const std::vector<std::string>& mark) {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) == 0) {
    const Fd read(ends[0]);
    pipe_.reset(ends[1]);
    pid_ = ::fork();
    if (pid_ == 0) {
      ::close(pipe_.get());
      keep_guard(read.get(), mark);
    }
  }
  if (pid_ > 0) return;
  throw LaunchError(kExitFailure, std::string("cannot start a process: ") + std::strerror(errno),
                    "raise the limits of open files and processes: ulimit -n, ulimit -u");
}

Guard::~Guard() {
  add(kPeace);
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
