// Running the real `serried` binary from a test: its output, its exit code, its signals.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <string>
#include <vector>

#include "serried/launch/fd.h"

namespace serried::testing {

struct Result {
  int exit_code = -1;  // 128 + signal if a signal killed the command itself
  std::string out;
  std::string err;
  double seconds = 0;
};

/// A `serried run` in the background. Kills it, if it still runs, on destruction.
class Command {
 public:
  /// Starts `serried <arguments>`, with a marker variable in its environment that all its processes inherit. `program`
  /// stands for `serried`: words that begin with a path.
  explicit Command(std::vector<std::string> arguments, std::vector<std::string> environment = {},
                   const std::vector<std::string>& program = {SERRIED_BINARY});
  ~Command();
  Command(const Command&) = delete;
  Command& operator=(const Command&) = delete;

  pid_t pid() const { return pid_; }
  void send(int signal) const;

  /// Reads stdout and stderr until `text` stands in either `count` times. Fails the test after a minute.
  void wait_for(const std::string& text, int count = 1);

  /// What it has printed to stdout, as far as it has been read.
  const std::string& so_far() const { return result_.out; }

  /// Reads until the command ends. Fails the test after a minute.
  Result finish();

  /// Whether the command ends within a minute while nobody reads what it prints.
  bool ends_unread() const;

  /// Processes, the command included, that carry the marker.
  std::vector<pid_t> processes() const;

  /// Whether no process with the marker is left, at the latest after 2 s: orphans die a moment after their parent.
  bool nothing_left() const;

 private:
  bool read_some(std::chrono::steady_clock::time_point deadline);

  pid_t pid_ = -1;
  std::string marker_;
  launch::Fd out_;
  launch::Fd err_;
  Result result_;
  std::chrono::steady_clock::time_point begin_;
};

/// Runs `serried <arguments>` to its end and checks that it leaves no process behind.
Result serried(std::vector<std::string> arguments, std::vector<std::string> environment = {});

/// `serried run <options> sh -c <script>`.
std::vector<std::string> shell(std::vector<std::string> options, const std::string& script);

/// A TCP port that is free now.
int free_port();

/// A folder of this test's own, removed on destruction.
class TemporaryFolder {
 public:
  TemporaryFolder();
  ~TemporaryFolder();
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

/// A named pipe in `folder`, for ranks of a test to wait for each other.
std::string make_fifo(const TemporaryFolder& folder);

std::string read_file(const std::string& path);
void write_file(const std::string& path, const std::string& text);
std::vector<std::string> lines_of(const std::string& text);
int count_of(const std::string& text, const std::string& part);

}  // namespace serried::testing
