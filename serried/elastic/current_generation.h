// The groups of the generation that this rank is in, which end when it does.
#pragma once

#include <memory>
#include <mutex>

#include "serried/comm/groups/live_groups.h"
#include "serried/elastic/generations.h"

namespace serried::detail {

/// Aborts the groups of a generation, and the waits in its store, at the news that one of its ranks was lost; while
/// ranks still meet, at that of a newer table as well, to which some of them may have gone.
class CurrentGeneration {
 public:
  explicit CurrentGeneration(std::shared_ptr<Generations> generations);
  ~CurrentGeneration();
  CurrentGeneration(const CurrentGeneration&) = delete;

  /// Leaves the one before, and what is left of it where `after_loss`: ranks may wait there for this one.
  void begin_meeting(int64_t generation, bool after_loss);
  /// From now on only a loss ends it. False: it has ended.
  bool end_meeting();

  /// For a LiveGroupsGuard: groups that are made meanwhile belong to the generation.
  std::shared_ptr<LiveGroups> groups() const;

 private:
  void on_news();

  const std::shared_ptr<Generations> generations_;
  mutable std::mutex mutex_;
  std::shared_ptr<LiveGroups> groups_;  // null before the first meeting
  int64_t generation_ = -1;
  bool meeting_ = false;
  bool ended_ = false;
};

}  // namespace serried::detail
