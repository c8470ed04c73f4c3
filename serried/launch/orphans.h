// Processes that ranks started and left behind: a launcher inherits them, so it has to reap and to end them.
#pragma once

#include <sys/types.h>

#include <functional>
#include <set>
#include <string>
#include <vector>

#include "serried/launch/plan.h"

namespace serried::launch {

/// Whether process `pid` was started with all of `mark` in its environment. False if it is another user's.
bool carries(pid_t pid, const std::vector<std::string>& mark);

/// Children of this process that are neither ranks nor the guard, which is what `IsKept` says of a child.
class Orphans {
 public:
  using IsKept = std::function<bool(pid_t)>;

  /// Call it before the first rank starts: children that this process has by then are not the job's.
  explicit Orphans(const Assignment& assignment);
  /// Kills what is left, as where a job ends by an exception. Ranks and guard must be gone.
  ~Orphans();
  Orphans(const Orphans&) = delete;
  Orphans& operator=(const Orphans&) = delete;

  /// Reaps every child that has ended. Call it on SIGCHLD, with the child that sent it.
  void reap(pid_t from, const IsKept& is_kept);

  /// Sends SIGTERM once to every orphan of the job; whether there are any. Their own children come to this process when
  /// they end, so call it again on SIGCHLD.
  bool ask_to_end(const IsKept& is_kept);

  /// Kills every orphan of the job and waits for their end; not for those stuck in a file system, which it forgets.
  void kill(const IsKept& is_kept);

 private:
  bool is_ours(pid_t child);
  std::set<pid_t> find(const IsKept& is_kept);

  std::vector<std::string> mark_;
  std::set<pid_t> others_;  // not the job's, or forgotten
  bool only_ours_come_;
  std::set<pid_t> asked_;
};

}  // namespace serried::launch
