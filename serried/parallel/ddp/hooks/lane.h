// What hooks that communicate several times per bucket need: an order that all ranks agree on.
#pragma once

#include <functional>
#include <string>

#include "serried/parallel/ddp/comm_hook.h"

namespace serried::hooks::detail {

/// Remembers a group without keeping it alive. A later group may have its address, but not its name too.
class KnownGroup {
 public:
  KnownGroup() = default;
  explicit KnownGroup(const Group& group) : address_(group.get()), name_(group->getGroupName()) {}
  bool is(const Group& group) const { return address_ == group.get() && name_ == group->getGroupName(); }

 private:
  const void* address_ = nullptr;
  std::string name_;
};

/// Ranks match collectives by their order, but a collective that is issued when another is done comes at no fixed place
/// among those of the program. So chains of collectives run one after another, on a group where there are no others.
/// The group outlives the chains: dropped by a chain, it could end on one of its own threads, which it cannot.
class Lane {
 public:
  Lane() = default;
  ~Lane();
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  /// A group of the same ranks as `parent`, made when `parent` is another one than before: then all ranks must call.
  c10d::ProcessGroup& group(const Group& parent);

  /// Runs `start` when the chains that were started before have ended, well or not.
  HookFuture run(const std::function<HookFuture()>& start);

 private:
  void wait();

  KnownGroup parent_;
  Group group_;
  HookFuture last_;
};

/// Counts iterations, and agrees on the count when the group changes: of ranks that lost a peer some had seen the last
/// bucket of the iteration and some had not.
class Iterations {
 public:
  /// How many iterations have ended before this bucket. Counts one more if the bucket is the last.
  int64_t before(const Group& group, const c10d::GradBucket& bucket);

 private:
  KnownGroup group_;
  int64_t count_ = 0;
};

}  // namespace serried::hooks::detail
