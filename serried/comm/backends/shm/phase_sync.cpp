// Spin, then sleep in slices; between slices look for the dead, the abort and the deadline.
#include "serried/comm/backends/shm/phase_sync.h"

#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>

#include <c10/util/StringUtil.h>

#include "serried/base/env.h"
#include "serried/base/error.h"
#include "serried/base/interrupt.h"
#include "serried/base/log.h"
#include "serried/comm/agree/host.h"
#include "serried/comm/agree/rank_texts.h"
#include "serried/comm/agree/says_that_it_waits.h"
#include "serried/comm/collectives/unknown_place.h"
#include "serried/comm/groups/live_groups.h"

namespace serried::shm {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr milliseconds kVisitPatience{100};
constexpr const char* kAfterLossFix = "make a new group with the ranks that are left";
// Who returns from its work meets no error: the others made calls that it did not.
constexpr const char* kAfterLeaveFix =
    "make the same calls on every rank (join() where ranks have different numbers of batches), or a new group with the "
    "ranks that are left";
constexpr const char* kAfterFailureFix = "make a new group; the failure above came first";

// A yield that takes longer went to a program that computes: it keeps the core for milliseconds each time, while a rank
// that sleeps gets the core back as soon as its peer wakes it. So then ranks sleep at once, and try again later.
constexpr std::chrono::microseconds kLongYield{500};
constexpr int kWaitsWithoutYield = 200;

// How long a rank sleeps that has something else to do as well.
constexpr std::chrono::microseconds kBusySlice{200};

int usable_cores() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) != 0) return int(sysconf(_SC_NPROCESSORS_ONLN));
  return CPU_COUNT(&set);
}

std::string where_of(const watch::Record& record) {
  const std::string text = watch::describe(record);  // "#3 all_reduce f32[4] sum"
  const size_t begin = text.find(' ');
  if (begin == std::string::npos || record.kind == watch::Kind::none) return "shm";
  const size_t end = text.find(' ', begin + 1);
  return text.substr(begin + 1, end == std::string::npos ? end : end - begin - 1);
}

}  // namespace

void futex_sleep(std::atomic<uint32_t>& word, uint32_t seen, std::chrono::microseconds longest) {
  const timespec slice{.tv_sec = longest.count() / 1'000'000, .tv_nsec = longest.count() % 1'000'000 * 1000};
  syscall(SYS_futex, &word, FUTEX_WAIT, seen, &slice, nullptr, 0);
}

void futex_wake_all(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

WaitPolicy WaitPolicy::for_ranks(int num_ranks) {
  // A small subgroup still shares the cores with the other ranks of the host.
  const int busy =
      std::max({num_ranks, int(env::maybe_integer("LOCAL_WORLD_SIZE").value_or(0)), rank_label().world_size});
  if (busy <= usable_cores()) return {.spins = 1000, .yields = 1000, .spins_per_yield = 20, .own_core = true};
  return {.spins = 50, .yields = 20, .spins_per_yield = 0, .own_core = false};
}

PhaseSync::PhaseSync(const Segment& segment, int rank, WaitPolicy policy, const std::vector<int>& members)
    : segment_(segment),
      rank_(rank),
      policy_(policy),
      members_(members),
      index_(int(std::find(members.begin(), members.end(), rank) - members.begin())),
      pidfds_(segment.world_size(), -1) {}

PhaseSync::~PhaseSync() {
  for (const int fd : pidfds_) {
    if (fd >= 0) close(fd);
  }
}

void PhaseSync::meet(milliseconds timeout, const std::string& place) {
  timeout_ = timeout;
  meeting_ = true;
  place_ = place;
  watch_page::RankPage& page = segment_.info(rank_).page;
  page.rank.store(rank_label().rank < 0 ? rank_ : rank_label().rank, std::memory_order_relaxed);
  page.pid.store(getpid());
  post();
  wait_all();
  meeting_ = false;
  for (const int peer : members_) {
    const int pid = segment_.info(peer).page.pid.load();
    if (pid != getpid()) pidfds_[peer] = int(syscall(SYS_pidfd_open, pid, 0));
  }
}

void PhaseSync::start(const watch::Record& record, milliseconds timeout) {
  current_ = record;
  check_usable();
  timeout_ = timeout;
  RankInfo& info = segment_.info(rank_);
  info.records[record.sequence & 1] = record;
  info.page.newest.store(record.sequence, std::memory_order_release);
}

void PhaseSync::post() {
  RankLine& line = segment_.line(rank_);
  line.phase.store(++phase_, std::memory_order_seq_cst);
  if (line.waiters.load(std::memory_order_seq_cst) != 0) futex_wake_all(line.phase);
}

void PhaseSync::wait_all() {
  const int n = int(members_.size());
  // Each rank starts with its neighbour, so that not all look at one line first.
  for (int i = 1; i < n; ++i) wait(members_[size_t((index_ + i) % n)], phase_);
}

void PhaseSync::wait_slowly(int peer, uint32_t phase) {
  for (int i = 0; i < policy_.spins; ++i) {
    if (reached(peer, phase)) return;
    cpu_relax();
  }
  if (yield_until(peer, phase)) return;
  RankLine& line = segment_.line(peer);
  const auto begin = steady_clock::now();
  watch_page::RankPage& page = segment_.info(rank_).page;
  page.waits_phase.store(phase, std::memory_order_relaxed);
  const detail::SaysThatItWaits says(page, current_.sequence, begin);
  while (true) {
    const std::chrono::microseconds longest = run_background() ? kBusySlice : kWaitSlice;
    line.waiters.fetch_add(1, std::memory_order_seq_cst);
    const uint32_t seen = line.phase.load(std::memory_order_seq_cst);
    if (int32_t(seen - phase) < 0 && !aborted()) futex_sleep(line.phase, seen, longest);
    line.waiters.fetch_sub(1, std::memory_order_seq_cst);
    if (reached(peer, phase)) return;
    check_usable();
    const int gone = missing_peer(phase);
    if (gone >= 0) fail_for_gone_peer(gone);
    const auto waited = std::chrono::duration_cast<milliseconds>(steady_clock::now() - begin);
    if (waited >= timeout_) fail_for_timeout(waited);
    check_interrupt();
    if (meeting_) check_run();
  }
}

/// Raises where this thread was told to give up. The other ranks then need not wait for it.
void PhaseSync::check_interrupt() {
  if (!interrupt::is_possible()) return;
  try {
    interrupt::check();
  } catch (...) {
    abort(interrupt::reason(rank_));
    throw;
  }
}

/// A rank of this run that has failed does not come, though it lives.
void PhaseSync::check_run() {
  if (!detail::is_run_aborted()) return;
  const std::string what = c10::str("rank ", rank_, " gave up in new_group: another rank of the run has failed");
  abort(what, Cause::loss);
  fail(what, kAfterLossFix);
}

/// Lets others run while looking; false if it is time to sleep.
bool PhaseSync::yield_until(int peer, uint32_t phase) {
  if (waits_without_yield_ > 0) {
    --waits_without_yield_;
    return false;
  }
  for (int i = 0; i < policy_.yields; ++i) {
    const auto before = steady_clock::now();
    run_background();
    sched_yield();
    const bool lost_the_core = steady_clock::now() - before > kLongYield;
    for (int spin = 0; spin <= policy_.spins_per_yield; ++spin) {
      if (reached(peer, phase)) return true;
      cpu_relax();
    }
    if (!lost_the_core) continue;
    waits_without_yield_ = kWaitsWithoutYield;
    return false;
  }
  return false;
}

bool PhaseSync::is_gone(int peer) const {
  if (peer == rank_) return false;
  if (segment_.info(peer).page.left.load(std::memory_order_acquire) != 0) return true;
  if (pidfds_[peer] >= 0) {
    pollfd poll_entry{.fd = pidfds_[peer], .events = POLLIN, .revents = 0};
    return poll(&poll_entry, 1, 0) > 0;
  }
  const int pid = segment_.info(peer).page.pid.load();
  return pid != 0 && pid != getpid() && kill(pid, 0) != 0 && errno == ESRCH;
}

int PhaseSync::dead_peer() const {
  for (const int peer : members_) {
    if (segment_.info(peer).page.left.load(std::memory_order_acquire) == 0 && is_gone(peer)) return peer;
  }
  return -1;
}

bool PhaseSync::is_member(int rank) const {
  return std::binary_search(members_.begin(), members_.end(), rank);
}

/// Whether the rank's newest call is `call`, or a later one.
bool PhaseSync::has_made(int rank, const watch::Record& call) const {
  return segment_.info(rank).page.newest.load(std::memory_order_acquire) >= call.sequence;
}

std::vector<int> PhaseSync::ranks_behind() const {
  std::vector<int> behind;
  for (int rank = 0; rank < segment_.world_size(); ++rank) {
    if (rank != rank_ && !has_made(rank, current_)) behind.push_back(rank);
  }
  return behind;
}

int PhaseSync::missing_peer(uint32_t phase) const {
  for (int peer = 0; peer < segment_.world_size(); ++peer) {
    // Order matters: a peer may reach the phase and leave between the two looks.
    if (!is_gone(peer)) continue;
    const bool has_come = is_member(peer) ? reached(peer, phase) : has_made(peer, current_);
    if (!has_come) return peer;
  }
  return -1;
}

void PhaseSync::fail_for_gone_peer(int peer) {
  // A peer that gave up has aborted before it went: then its reason is the cause, not its absence.
  check_usable();
  const watch_page::RankPage& page = segment_.info(peer).page;
  const bool has_left = page.left.load() != 0;
  const std::string how = has_left ? c10::str("rank ", peer, " has left the group")
                                   : c10::str("rank ", peer, " (pid ", page.pid.load(), ") died");
  const std::string what =
      c10::str(how, " while rank ", rank_, " was in ", meeting_ ? "new_group" : watch::describe_place(current_));
  abort(what, Cause::loss);
  fail(what, has_left ? kAfterLeaveFix : kAfterLossFix);
}

std::string PhaseSync::where() const {
  return meeting_ ? "new_group" : where_of(current_);
}

void PhaseSync::fail_to_meet(milliseconds waited) {
  std::vector<int> missing;
  for (const int rank : members_) {
    if (!reached(rank, phase_)) missing.push_back(rank);
  }
  fail(c10::str("timed out after ", waited.count(), " ms while the ranks met in shared memory",
                place_.empty() ? "" : ", after they had met at " + place_, ": ", detail::rank_list(missing), " of ",
                members_.size(), " did not come"),
       "look at what those ranks are doing: they may be stopped or slow; pass a longer timeout if they are slow");
}

void PhaseSync::fail_for_timeout(milliseconds waited) {
  if (meeting_) fail_to_meet(waited);
  fail(watch::missing_text(current_, waited.count(), newest_records()) + detail::stopped_text(pids()),
       "look at the missing rank: it may be stopped, slow or in other code; raise the group's timeout if it is slow");
}

/// What is known of each rank; of one whose teller is missing too, nothing newer is.
std::vector<watch::Record> PhaseSync::newest_records() const {
  std::vector<watch::Record> newest;
  for (int rank = 0; rank < segment_.world_size(); ++rank) {
    const RankInfo& info = segment_.info(rank);
    newest.push_back(info.records[info.page.newest.load(std::memory_order_acquire) & 1]);
    if (is_member(rank) || has_made(rank, current_)) continue;
    if (!has_made(tellers_[size_t(rank)], current_)) newest.back().sequence = watch::kUnknownPlace;
  }
  return newest;
}

std::vector<int> PhaseSync::pids() const {
  std::vector<int> all;
  for (int rank = 0; rank < segment_.world_size(); ++rank) all.push_back(segment_.info(rank).page.pid.load());
  return all;
}

void PhaseSync::abort(const std::string& why, Cause cause) {
  Header& header = segment_.header();
  if (header.reason_taken.exchange(1) == 0) {
    header.by_loss.store(cause == Cause::loss, std::memory_order_relaxed);
    const size_t length = std::min(why.size(), sizeof(header.reason) - 1);
    std::memcpy(header.reason, why.data(), length);
    header.reason[length] = '\0';
    header.reason_ready.store(1, std::memory_order_release);
    header.page.failed.store(1, std::memory_order_release);
  }
  header.aborted.store(1, std::memory_order_seq_cst);
  for (int rank = 0; rank < segment_.world_size(); ++rank) {
    futex_wake_all(segment_.line(rank).phase);
    futex_wake_all(segment_.bell(rank).rings);
  }
}

void PhaseSync::fail(const std::string& what, const std::string& fix) {
  abort(what);
  log::line(log::Topic::comm, what);
  raise<c10::DistBackendError>({where(), what, fix});
}

void PhaseSync::begin_visit() {
  segment_.info(rank_).visits.store(1, std::memory_order_seq_cst);
  // In one order with give_up: this rank sees the abort, or the rank that gives up sees the visit.
  if (segment_.header().aborted.load(std::memory_order_seq_cst) == 0) return;
  end_visit();
  check_usable();
}

void PhaseSync::end_visit() {
  segment_.info(rank_).visits.store(0, std::memory_order_release);
}

void PhaseSync::give_up(bool peers_are_threads) {
  abort(c10::str("rank ", rank_, " gave up in ", watch::describe_place(current_)));
  const auto deadline = steady_clock::now() + kVisitPatience;
  for (int peer = 0; peer < segment_.world_size(); ++peer) {
    while (segment_.info(peer).visits.load(std::memory_order_seq_cst) != 0) {
      if (!peers_are_threads && (is_gone(peer) || steady_clock::now() > deadline)) break;
      sched_yield();
    }
  }
}

void PhaseSync::check_usable() const {
  if (aborted()) check_usable(where());
}

void PhaseSync::check_usable(std::string_view where) const {
  if (!aborted()) return;
  raise<c10::DistBackendError>({where, "the group is unusable since: " + abort_reason(), unusable_fix()});
}

const char* PhaseSync::unusable_fix() const {
  return is_by_loss() ? kAfterLossFix : kAfterFailureFix;
}

std::string PhaseSync::abort_reason() const {
  const Header& header = segment_.header();
  // The first to abort may still be writing its reason; a rank that died while doing so must not block us.
  for (int i = 0; i < 1000 && header.reason_ready.load(std::memory_order_acquire) == 0; ++i) sched_yield();
  if (header.reason_ready.load(std::memory_order_acquire) == 0) return "a rank aborted it";
  return {header.reason, strnlen(header.reason, sizeof(header.reason))};
}

void PhaseSync::leave() {
  segment_.info(rank_).page.left.store(1, std::memory_order_release);
  for (int rank = 0; rank < segment_.world_size(); ++rank) futex_wake_all(segment_.bell(rank).rings);
  futex_wake_all(segment_.line(rank_).phase);
}

}  // namespace serried::shm
