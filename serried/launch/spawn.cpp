// fork and exec; between the two only calls that are safe there, everything else is prepared before.
#include "serried/launch/spawn.h"

#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "serried/launch/error.h"

namespace serried::launch {
namespace {

struct Pipe {
  Fd read;
  Fd write;
};

[[noreturn]] void system_error(const std::string& call, int error) {
  throw LaunchError(kExitFailure, call + " failed: " + std::strerror(error),
                    error == EMFILE || error == ENFILE ? "raise the limit of open files: ulimit -n"
                    : error == EAGAIN                  ? "raise the limit of processes: ulimit -u"
                                                       : "free memory or processes on this machine");
}

Pipe make_pipe() {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) system_error("pipe", errno);
  return {Fd(ends[0]), Fd(ends[1])};
}

std::vector<char*> pointers(const std::vector<std::string>& texts) {
  std::vector<char*> result;
  for (const std::string& text : texts) result.push_back(const_cast<char*>(text.c_str()));
  result.push_back(nullptr);
  return result;
}

struct ChildSetup {
  const char* path;
  char* const* arguments;
  char* const* environment;
  const std::vector<int>& keep_fds;
  const cpu_set_t* cores;
  int in_fd;
  int out_fd;
  int err_fd;
  pid_t launcher;
};

void restore_signals() {
  struct sigaction action {};
  action.sa_handler = SIG_DFL;
  // A shell starts background jobs with SIGINT ignored; a rank must hear what the launcher forwards.
  for (int signal : {SIGINT, SIGQUIT, SIGTERM, SIGPIPE, SIGCHLD, SIGUSR1, SIGUSR2})
    ::sigaction(signal, &action, nullptr);
  sigset_t none;
  sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
}

int become_program(const ChildSetup& setup) {
  if (::setpgid(0, 0) != 0) return errno;
  if (::prctl(PR_SET_PDEATHSIG, SIGKILL) != 0) return errno;
  if (::getppid() != setup.launcher) ::_exit(kExitFailure);  // the launcher died before the line above
  if (::dup2(setup.in_fd, STDIN_FILENO) < 0 || ::dup2(setup.out_fd, STDOUT_FILENO) < 0 ||
      ::dup2(setup.err_fd, STDERR_FILENO) < 0) {
    return errno;
  }
  if (setup.cores != nullptr && ::sched_setaffinity(0, sizeof *setup.cores, setup.cores) != 0) return errno;
  for (const int fd : setup.keep_fds) {
    if (::fcntl(fd, F_SETFD, 0) != 0) return errno;
  }
  restore_signals();
  ::execve(setup.path, setup.arguments, setup.environment);
  return errno;
}

[[noreturn]] void exec_error(const std::string& path, int error) {
  if (error == ENOENT) {
    throw LaunchError(kExitNotFound, "program " + path + " cannot start: its interpreter or loader does not exist",
                      "check its first line (#!...) or the machine it was built for");
  }
  if (error == ENOEXEC) {
    throw LaunchError(kExitNotExecutable, "program " + path + " is no binary of this machine and has no #! line",
                      "build it for this machine, or begin the script with #!/bin/sh");
  }
  throw LaunchError(kExitNotExecutable, "program " + path + " cannot start: " + std::strerror(error),
                    "check its permissions and its file system's mount options");
}

int read_exec_error(int fd) {
  int error = 0;
  ssize_t count;
  do count = ::read(fd, &error, sizeof error);
  while (count < 0 && errno == EINTR);
  return count == sizeof error ? error : 0;
}

}  // namespace

Child spawn(const SpawnRequest& request) {
  Pipe out = make_pipe();
  Pipe err = make_pipe();
  Pipe report = make_pipe();  // closed by a successful exec
  Fd null(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  if (!null) system_error("opening /dev/null", errno);
  const std::vector<char*> arguments = pointers(request.arguments);
  const std::vector<char*> environment = pointers(request.environment);
  cpu_set_t cores;
  CPU_ZERO(&cores);
  for (const int core : request.cores) {
    if (core < CPU_SETSIZE) CPU_SET(core, &cores);
  }
  const ChildSetup setup{.path = request.path.c_str(),
                         .arguments = arguments.data(),
                         .environment = environment.data(),
                         .keep_fds = request.keep_fds,
                         .cores = request.cores.empty() ? nullptr : &cores,
                         .in_fd = request.stdin_fd >= 0 ? request.stdin_fd : null.get(),
                         .out_fd = out.write.get(),
                         .err_fd = err.write.get(),
                         .launcher = ::getpid()};
  const pid_t pid = ::fork();
  if (pid < 0) system_error("fork", errno);
  if (pid == 0) {
    const int error = become_program(setup);
    [[maybe_unused]] const ssize_t written = ::write(report.write.get(), &error, sizeof error);
    ::_exit(kExitNotFound);
  }
  report.write.reset();
  if (const int error = read_exec_error(report.read.get()); error != 0) {
    ::waitpid(pid, nullptr, 0);
    exec_error(request.path, error);
  }
  for (const Fd* end : {&out.read, &err.read}) ::fcntl(end->get(), F_SETFL, O_NONBLOCK);
  return {pid, std::move(out.read), std::move(err.read)};
}

}  // namespace serried::launch
