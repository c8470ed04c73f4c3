// A small process that outlives a launcher killed with -9 and ends what the kernel does not: what ranks started.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

#include "serried/launch/fd.h"

namespace serried::launch {

/// Ranks themselves die with the launcher (PR_SET_PDEATHSIG); their own children would live on.
class Guard {
 public:
  /// If the launcher dies, every process that carries `mark` is killed.
  explicit Guard(const std::vector<std::string>& mark);
  /// The launcher ends in peace; the guard ends with it.
  ~Guard();
  Guard(const Guard&) = delete;
  Guard& operator=(const Guard&) = delete;

  pid_t pid() const { return pid_; }

  /// Kill this process group too if the launcher dies.
  void add(pid_t group);
  /// It has been ended.
  void remove(pid_t group);

 private:
  pid_t pid_ = -1;
  Fd pipe_;
};

}  // namespace serried::launch
