// A small process that outlives a launcher killed with -9 and ends what the kernel does not: children of ranks.
#pragma once

#include <sys/types.h>

#include "serried/launch/fd.h"

namespace serried::launch {

/// Ranks themselves die with the launcher (PR_SET_PDEATHSIG); their own children would live on.
class Guard {
 public:
  Guard();
  /// The launcher ends in peace; the guard ends with it.
  ~Guard();
  Guard(const Guard&) = delete;
  Guard& operator=(const Guard&) = delete;

  /// Kill this process group if the launcher dies.
  void add(pid_t group);
  /// It has been ended.
  void remove(pid_t group);

 private:
  pid_t pid_ = -1;
  Fd pipe_;
};

}  // namespace serried::launch
