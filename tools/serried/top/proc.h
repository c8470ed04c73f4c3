// What the kernel says of processes in /proc. Asks the kernel alone: nothing here can wait for a process.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace serried::top {

struct Process {
  pid_t pid = 0;
  pid_t parent = 0;
  char state = '?';          // R S D T t Z X
  uint64_t cpu_ticks = 0;    // user and system, of all threads
  uint64_t start_ticks = 0;  // since boot: tells a number that is used again
  int64_t resident_bytes = 0;
  int64_t shared_bytes = 0;  // of these, in shared memory

  bool has_ended() const { return state == 'Z' || state == 'X'; }
  bool is_stopped() const { return state == 'T' || state == 't'; }
};

/// An open file in memory: "/memfd:serried (deleted)" as "serried".
struct MemoryFile {
  int fd = -1;
  std::string name;
};

/// A folder laid out as /proc; tests have their own.
class Proc {
 public:
  explicit Proc(std::string root = "/proc") : root_(std::move(root)) {}

  const std::string& root() const { return root_; }

  /// All processes there are; forgets what it knows of others.
  std::vector<pid_t> pids();

  /// Nothing where there is no such process.
  std::optional<Process> process(pid_t pid) const;

  std::optional<uid_t> owner(pid_t pid) const;

  /// With which the launcher started it; empty where that was somebody else, or it is another user's. Asked once of
  /// processes that have lived for some seconds: reading it takes a lock of the process's memory.
  const std::map<std::string, std::string>& environment(const Process& process);

  /// "./train --steps 100", made printable.
  std::string command(pid_t pid) const;

  /// Its open files in memory whose names begin with "serried"; empty where it is another user's.
  std::vector<MemoryFile> memory_files(pid_t pid) const;

  /// Of such a file.
  std::string file_path(pid_t pid, int fd) const;

  double seconds_since_start(const Process& process) const;

 private:
  struct Known {
    uint64_t start_ticks = 0;
    bool is_settled = false;
    std::map<std::string, std::string> environment;
  };

  std::string path(pid_t pid, const char* name) const { return root_ + "/" + std::to_string(pid) + "/" + name; }

  const std::string root_;
  std::map<pid_t, Known> known_;
};

/// Parses the lines of /proc/<pid>/stat and /proc/<pid>/status; nothing where they are something else.
std::optional<Process> parse_process(const std::string& stat, const std::string& status);

}  // namespace serried::top
