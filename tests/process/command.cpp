// posix_spawn of the binary under test, and reading it with poll.
#include "tests/process/command.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "serried/launch/socket.h"

namespace serried::testing {
namespace {

using Clock = std::chrono::steady_clock;
using launch::Fd;
constexpr std::chrono::seconds kLimit{60};

std::vector<char*> pointers(std::vector<std::string>& texts) {
  std::vector<char*> result;
  for (std::string& text : texts) result.push_back(text.data());
  result.push_back(nullptr);
  return result;
}

std::string unique_marker() {
  static std::atomic<int> count{0};
  return "SERRIED_TEST_MARKER=" + std::to_string(::getpid()) + "_" + std::to_string(++count);
}

void read_available(Fd& fd, std::string& text) {
  char buffer[65536];
  const ssize_t count = ::read(fd.get(), buffer, sizeof buffer);
  if (count > 0) text.append(buffer, static_cast<size_t>(count));
  if (count == 0) fd.reset();
}

}  // namespace

Command::Command(std::vector<std::string> arguments, std::vector<std::string> environment,
                 const std::vector<std::string>& program)
    : marker_(unique_marker()), begin_(Clock::now()) {
  int out[2];
  int err[2];
  if (::pipe2(out, O_CLOEXEC) != 0 || ::pipe2(err, O_CLOEXEC) != 0) throw std::runtime_error("pipe");
  out_.reset(out[0]);
  err_.reset(err[0]);
  const Fd out_write(out[1]);
  const Fd err_write(err[1]);
  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawn_file_actions_adddup2(&actions, out[1], STDOUT_FILENO);
  ::posix_spawn_file_actions_adddup2(&actions, err[1], STDERR_FILENO);
  arguments.insert(arguments.begin(), program.begin(), program.end());
  for (char** entry = environ; *entry != nullptr; ++entry) environment.emplace_back(*entry);
  environment.push_back(marker_);
  const int error = ::posix_spawn(&pid_, program.front().c_str(), &actions, nullptr, pointers(arguments).data(),
                                  pointers(environment).data());
  ::posix_spawn_file_actions_destroy(&actions);
  if (error != 0) throw std::runtime_error("posix_spawn " + program.front());
}

Command::~Command() {
  if (pid_ < 0) return;
  ::kill(pid_, SIGKILL);
  ::waitpid(pid_, nullptr, 0);
}

void Command::send(int signal) const {
  ::kill(pid_, signal);
}

bool Command::read_some(Clock::time_point deadline) {
  pollfd fds[2] = {{.fd = out_.get(), .events = POLLIN, .revents = 0},
                   {.fd = err_.get(), .events = POLLIN, .revents = 0}};
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now());
  if (left.count() <= 0 || ::poll(fds, 2, static_cast<int>(left.count())) == 0) {
    ADD_FAILURE() << "no end after " << kLimit.count() << " s; so far:\n" << result_.out << result_.err;
    return false;
  }
  if (fds[0].revents != 0) read_available(out_, result_.out);
  if (fds[1].revents != 0) read_available(err_, result_.err);
  return true;
}

void Command::wait_for(const std::string& text, int count) {
  const auto deadline = Clock::now() + kLimit;
  while (count_of(result_.out + result_.err, text) < count) {
    if (!out_ && !err_) {
      ADD_FAILURE() << "ended without \"" << text << "\":\n" << result_.out << result_.err;
      return;
    }
    if (!read_some(deadline)) return;
  }
}

Result Command::finish() {
  const auto deadline = Clock::now() + kLimit;
  while (out_ || err_) {
    if (!read_some(deadline)) break;
  }
  if (out_ || err_) ::kill(pid_, SIGKILL);
  int status = 0;
  ::waitpid(pid_, &status, 0);
  pid_ = -1;
  result_.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  result_.seconds = std::chrono::duration<double>(Clock::now() - begin_).count();
  return result_;
}

bool Command::ends_unread() const {
  const Fd process(static_cast<int>(::syscall(SYS_pidfd_open, pid_, 0)));
  pollfd fd{.fd = process.get(), .events = POLLIN, .revents = 0};
  return ::poll(&fd, 1, static_cast<int>(std::chrono::milliseconds(kLimit).count())) == 1;
}

std::vector<pid_t> Command::processes() const {
  std::vector<pid_t> result;
  for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
    const std::string name = entry.path().filename();
    if (name.find_first_not_of("0123456789") != std::string::npos) continue;
    const std::string environment = '\0' + read_file(entry.path() / "environ");
    if (environment.find('\0' + marker_ + '\0') != std::string::npos) result.push_back(std::stoi(name));
  }
  return result;
}

bool Command::nothing_left() const {
  const auto deadline = Clock::now() + std::chrono::seconds(2);
  while (!processes().empty() && Clock::now() < deadline) ::poll(nullptr, 0, 5);
  return processes().empty();
}

Result serried(std::vector<std::string> arguments, std::vector<std::string> environment) {
  Command command(std::move(arguments), std::move(environment));
  Result result = command.finish();
  EXPECT_TRUE(command.nothing_left());
  return result;
}

std::vector<std::string> shell(std::vector<std::string> options, const std::string& script) {
  options.insert(options.begin(), "run");
  options.insert(options.end(), {"sh", "-c", script});
  return options;
}

int free_port() {
  return launch::port_of(launch::listen_on({"127.0.0.1", 0}));
}

TemporaryFolder::TemporaryFolder() {
  std::string name = std::filesystem::temp_directory_path() / "serried_launch_XXXXXX";
  if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("mkdtemp");
  path_ = name;
}

TemporaryFolder::~TemporaryFolder() {
  std::error_code error;
  std::filesystem::remove_all(path_, error);
}

std::string make_fifo(const TemporaryFolder& folder) {
  const std::string path = folder.path() + "/fifo";
  if (::mkfifo(path.c_str(), 0600) != 0) throw std::runtime_error("mkfifo");
  return path;
}

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

void write_file(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

std::vector<std::string> lines_of(const std::string& text) {
  std::istringstream stream(text);
  std::vector<std::string> lines;
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

int count_of(const std::string& text, const std::string& part) {
  int count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + part.size())) ++count;
  return count;
}

}  // namespace serried::testing
