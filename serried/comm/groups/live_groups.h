// The groups that the rank threads of one run have made, so that the first failure can abort them all.
#pragma once

#include "serried/comm/groups/group.h"

#include <memory>
#include <mutex>

namespace serried::detail {

/// One run's groups. Held weakly: a group ends when its rank drops it.
class LiveGroups {
 public:
  /// `outer`: the run that this thread is itself a rank of, or null.
  explicit LiveGroups(std::shared_ptr<LiveGroups> outer) : outer_(std::move(outer)) {}

  /// Remembers `group`, or aborts it at once if the run has already failed.
  void add(const Group& group);

  /// Aborts every group that is alive, and those that come later.
  void abort();
  bool is_aborted() const;

 private:
  const std::shared_ptr<LiveGroups> outer_;
  mutable std::mutex mutex_;
  bool aborted_ = false;
  std::vector<c10::weak_intrusive_ptr<c10d::ProcessGroup>> groups_;
};

/// The run of this thread, null outside of run_ranks.
std::shared_ptr<LiveGroups> live_groups_of_thread();

/// Whether this thread's run has failed. A group that is being made is not among those that are aborted then.
bool is_run_aborted();

/// Makes `groups` this thread's run while alive.
class LiveGroupsGuard {
 public:
  explicit LiveGroupsGuard(std::shared_ptr<LiveGroups> groups);
  ~LiveGroupsGuard();
  LiveGroupsGuard(const LiveGroupsGuard&) = delete;
  LiveGroupsGuard& operator=(const LiveGroupsGuard&) = delete;

 private:
  std::shared_ptr<LiveGroups> previous_;
};

/// Every new group passes here; free outside of run_ranks.
void note_group(const Group& group);

}  // namespace serried::detail
