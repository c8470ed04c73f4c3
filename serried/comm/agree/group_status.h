// Where each rank of a group is, and why the group failed: in memory that the ranks of one host share, else in the
// store.
#pragma once

#include "serried/base/watch_page.h"
#include "serried/comm/agree/rank_texts.h"
#include "serried/comm/agree/shared_memory.h"
#include "serried/comm/collectives/watch.h"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace serried::detail {

/// Why a group can no longer be used: the first failure of any rank.
struct Failure {
  std::string what;
  std::string fix;
};

/// Thread-safe, except that one thread at a time enters and leaves. Every rank of the group makes one; blocks until all
/// have come. On one host the ranks share memory: a mismatch is seen by the last of the ranks that disagree, a failure
/// by all at once. Elsewhere ranks learn of each other only when one of them reports, through the store.
class GroupStatus {
 public:
  GroupStatus(c10::intrusive_ptr<c10d::Store> store, int rank, int world_size, std::chrono::milliseconds timeout);
  ~GroupStatus();
  GroupStatus(const GroupStatus&) = delete;
  GroupStatus& operator=(const GroupStatus&) = delete;

  /// Whether all ranks run on one host.
  bool one_host() const { return one_host_; }

  /// Whether the ranks share memory.
  bool is_shared() const { return is_shared_; }

  /// This rank starts the collective `record`. `print` holds what must agree. Fails the group, and is false, if a
  /// peer's call of the same sequence disagrees.
  bool enter(const watch::Record& record, uint64_t print);

  /// The collective never started: its arguments were refused. Its sequence is free again.
  void leave(uint64_t sequence);

  /// Fails the group for all ranks; the first failure stays.
  void fail(const Failure& failure);

  bool failed() const;

  /// Meaningful once `failed`.
  Failure failure() const;

  /// Who is missing in `waiting`, where each rank is, which have ended or left. May read the store for up to a second.
  std::string missing_text(const watch::Record& waiting, int64_t waited_ms);

  /// "; rank 2 has left the group; the process of rank 3 has ended", or nothing.
  std::string gone_text() const;

  /// This rank makes no more calls; said at the end at the latest.
  void say_left();

  /// Whether all other ranks have left or ended, as far as this rank can see; false where there are none.
  bool is_alone() const;

  /// The newest collective of `rank`, as far as this rank can see.
  watch::Record newest(int rank) const;

  /// What those who look from outside call the group.
  void set_name(const std::string& group);

  /// Where this rank says what those who look from outside want to know.
  watch_page::RankPage& page() const;

 private:
  struct Slot;
  struct RankStatus;
  struct Shared;

  void meet();
  void describe_layout();
  SharedMemory make_memory();
  SharedMemory open_memory(const std::string& place);
  int64_t bytes() const;
  RankStatus& status_of(int rank) const;
  bool read_slot(int rank, uint64_t sequence, watch::Record& record, uint64_t& print) const;
  bool agrees(const watch::Record& record, uint64_t print, int other);
  std::vector<watch::Record> read_reports(const watch::Record& waiting, std::vector<int>& silent);
  std::string reported_text(const watch::Record& waiting, int64_t waited_ms);

  const StoreRanks ranks_;
  const int rank_;
  const int world_size_;
  bool one_host_ = false;
  bool is_shared_ = false;
  SharedMemory memory_;  // its file stays open: peers, and those who look from outside, come through /proc
  Shared* shared_ = nullptr;
};

}  // namespace serried::detail
