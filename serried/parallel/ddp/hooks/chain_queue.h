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
class ChainQueue {
 public:
  ChainQueue() = default;
  ~ChainQueue();
  ChainQueue(const ChainQueue&) = delete;
  ChainQueue& operator=(const ChainQueue&) = delete;

  /// A group of the same ranks as `parent`, made when `parent` is another one than before: then all ranks must call.
  const Group& group(const Group& parent);

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

  int64_t count() const { return count_; }
  /// Counts one. Called by itself for one that was replayed instead of run.
  void next();

  /// How the iterations of a call that begins now lie to iteration `start`. Asked by recorders, when a call begins.
  uint64_t phase(int64_t start);
  static constexpr uint64_t kBefore = 0;
  static constexpr uint64_t kFromThere = 1;  // greater: some of the call are before, some are not

  /// How many iterations of a recorded call are over.
  int64_t num_in_call() const { return count_ - call_begin_; }

 private:
  KnownGroup group_;
  int64_t count_ = 0;
  int64_t call_begin_ = 0;
  int64_t num_per_call_ = 1;  // the most that there were
};

}  // namespace serried::hooks::detail
