// Waiting for peers: phases that only grow, bounded sleeps, and what to say when a peer does not come.
#pragma once

#include "serried/comm/backends/shm/segment.h"

#include <chrono>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace serried::shm {

/// How long to look at a flag before sleeping. Spinning pays only while every rank has a core of its own: with more
/// ranks than cores the peer cannot come before this rank lets go. Sleeping costs tens of microseconds to wake from, so
/// a rank with a core of its own goes on looking, but lets others run in between.
struct WaitPolicy {
  int spins = 1000;
  int yields = 1000;
  int spins_per_yield = 20;
  bool own_core = true;

  static WaitPolicy for_ranks(int num_ranks);
};

/// One rank's side of the phases. One thread at a time, except `abort`, `leave` and what says so.
class PhaseSync {
 public:
  /// `members`: the ranks that share the segment, ascending.
  PhaseSync(const Segment& segment, int rank, WaitPolicy policy, const std::vector<int>& members);
  ~PhaseSync();
  PhaseSync(const PhaseSync&) = delete;
  PhaseSync& operator=(const PhaseSync&) = delete;

  /// What else goes on while this rank waits, at least every 50 ms; whether it is to be called again soon.
  using Background = std::function<bool()>;
  void set_background(Background background) { background_ = std::move(background); }

  /// For each rank that is no member, the member that writes what is known of it into the segment.
  void set_tellers(std::vector<int> tellers) { tellers_ = std::move(tellers); }

  /// Publishes this process and waits until every member has done so; then peers can be watched.
  /// `place` is where the ranks met before, for messages.
  void meet(std::chrono::milliseconds timeout, const std::string& place);

  /// A new collective: raises if the group is unusable. `record` is what reports say of this rank.
  void start(const watch::Record& record, std::chrono::milliseconds timeout);

  uint32_t phase() const { return phase_; }

  /// Whether it is the lowest of the ranks that share the segment.
  bool is_first() const { return index_ == 0; }

  /// Tells the peers that this rank has reached its next phase.
  void post();

  bool reached(int peer, uint32_t phase) const {
    return int32_t(segment_.line(peer).phase.load(std::memory_order_acquire) - phase) >= 0;
  }

  void wait(int peer, uint32_t phase) {
    if (!reached(peer, phase)) wait_slowly(peer, phase);
  }

  /// Waits until every member has reached this rank's phase.
  void wait_all();

  /// Makes the group unusable for all ranks, with `why` as the reason they name. The first reason stays.
  enum class Cause { failure, loss };
  void abort(const std::string& why, Cause cause = Cause::failure);
  bool aborted() const { return segment_.header().aborted.load(std::memory_order_acquire) != 0; }

  /// Aborts with `what` and raises it.
  [[noreturn]] void fail(const std::string& what, const std::string& fix);

  /// For the end of a collective that failed, which gives its memory back to the caller: aborts the group, so that no
  /// visit begins, and waits until all have ended. Threads of this process end theirs soon; a peer that is a process
  /// may be dead or stopped in the middle of one, so it gets 100 ms.
  void give_up(bool peers_are_threads);

  /// A peer that has ended without leaving the group; -1 if there is none.
  int dead_peer() const;

  /// Raises if the group was aborted.
  void check_usable() const;

  /// The same for calls that are no collectives; any thread may ask.
  void check_usable(std::string_view where) const;
  /// Whether that was because a rank died or left.
  bool is_by_loss() const { return segment_.header().by_loss.load(std::memory_order_relaxed) != 0; }
  /// What to do about it: ranks are left to go on with only where one was lost.
  const char* unusable_fix() const;

  /// Why it was; any thread may ask.
  std::string abort_reason() const;

  /// The rank of a peer that is gone, by death or in order, and has not reached `phase`; -1 if there is none.
  int missing_peer(uint32_t phase) const;
  bool is_gone(int peer) const;
  [[noreturn]] void fail_for_gone_peer(int peer);
  [[noreturn]] void fail_for_timeout(std::chrono::milliseconds waited);
  std::chrono::milliseconds timeout() const { return timeout_; }
  const WaitPolicy& policy() const { return policy_; }
  watch_page::RankPage& page() const { return segment_.info(rank_).page; }

  /// The ranks that have not made this rank's newest call yet.
  std::vector<int> ranks_behind() const;

  /// This rank closes the group in order.
  void leave();

  /// Each rank's process.
  std::vector<int> pids() const;

  const watch::Record& current() const { return current_; }

 private:
  friend class Visit;

  void begin_visit();
  void end_visit();
  void wait_slowly(int peer, uint32_t phase);
  bool yield_until(int peer, uint32_t phase);
  void check_interrupt();
  bool run_background() { return background_ && background_(); }
  bool is_member(int rank) const;
  bool has_made(int rank, const watch::Record& call) const;
  std::vector<watch::Record> newest_records() const;
  void check_run();
  [[noreturn]] void fail_to_meet(std::chrono::milliseconds waited);
  std::string where() const;

  const Segment& segment_;
  const int rank_;
  const WaitPolicy policy_;
  const std::vector<int> members_;
  const int index_;  // of this rank among them
  Background background_;
  std::vector<int> tellers_;  // empty where all are members
  std::vector<int> pidfds_;
  bool meeting_ = false;  // until every rank has come; no collective is current then
  std::string place_;
  watch::Record current_;
  std::chrono::milliseconds timeout_{};
  uint32_t phase_ = 0;
  int waits_without_yield_ = 0;  // the machine is busy with something else
};

/// While it lives, this rank uses memory of its peers that is not the segment's own, and none of them takes it back.
/// Raises if the group was aborted: then some have. Nothing waits for a peer in between.
class Visit {
 public:
  explicit Visit(PhaseSync& sync) : sync_(sync) { sync_.begin_visit(); }
  ~Visit() { sync_.end_visit(); }
  Visit(const Visit&) = delete;
  Visit& operator=(const Visit&) = delete;

 private:
  PhaseSync& sync_;
};

/// The period of health checks.
inline constexpr std::chrono::milliseconds kWaitSlice{50};

/// Sleeps until `word` differs from `seen`, somebody wakes it, or `longest` has passed.
void futex_sleep(std::atomic<uint32_t>& word, uint32_t seen, std::chrono::microseconds longest = kWaitSlice);
void futex_wake_all(std::atomic<uint32_t>& word);

/// A hint to the core that this is a spin loop.
inline void cpu_relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace serried::shm
