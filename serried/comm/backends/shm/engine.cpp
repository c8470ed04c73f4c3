// What all collectives share: arriving, checking that all called the same, and leaving together.
#include "serried/comm/backends/shm/engine.h"

#include <algorithm>
#include <numeric>

#include <c10/util/StringUtil.h>

namespace serried::shm {
namespace {

std::vector<int> all_if_empty(std::vector<int> members, int world_size) {
  if (!members.empty()) return members;
  members.resize(size_t(world_size));
  std::iota(members.begin(), members.end(), 0);
  return members;
}

}  // namespace

Piece Pieces::at(int peer) const {
  if (only >= 0 && peer != only) return {};
  if (!list.empty()) return list[peer];
  return {.data = base + peer * stride, .bytes = bytes};
}

int64_t Pieces::largest(int num_peers) const {
  if (list.empty()) return bytes;
  int64_t most = 0;
  for (int peer = 0; peer < num_peers; ++peer) most = std::max(most, at(peer).bytes);
  return most;
}

Engine::Engine(Segment segment, int rank, WaitPolicy policy, bool one_process, std::vector<int> members)
    : segment_(std::move(segment)),
      rank_(rank),
      members_(all_if_empty(std::move(members), segment_.world_size())),
      index_(int(std::find(members_.begin(), members_.end(), rank) - members_.begin())),
      sync_(segment_, rank, policy, members_),
      memory_(segment_, rank, one_process) {}

void Engine::meet(std::chrono::milliseconds timeout, const std::string& place) {
  sync_.meet(timeout, place);
}

void Engine::publish(Op& op, uint32_t flags, uint64_t address, uint64_t extent) {
  segment_.line(rank_).offers[op.parity] = {
      .fingerprint = uint32_t(watch::fingerprint(op.record)), .flags = flags, .address = address, .extent = extent};
  sync_.post();
  op.arrival = sync_.phase();
}

void Engine::arrive(Op& op) {
  begin(op);
  arrive_at_step(op);
}

void Engine::begin(Op& call) {
  call.record.sequence = ++sequence_;
  sync_.start(call.record, call.timeout);
}

void Engine::arrive_at_step(Op& op) {
  op.parity = int(++num_steps_ & 1);
  switch (op.kind) {
    case Op::Kind::all_reduce: return arrive_all_reduce(op);
    case Op::Kind::exchange:
    case Op::Kind::reduce_pieces: return arrive_with_pieces(op);
    case Op::Kind::barrier: return publish(op, 0, 0, 0);
  }
}

bool Engine::all_have_arrived(const Op& op) {
  for (const int peer : members_) {
    if (peer != rank_ && !sync_.reached(peer, op.arrival)) return false;
  }
  return true;
}

void Engine::complete(Op& op) {
  try {
    complete_step(op);
  } catch (...) {
    sync_.give_up(memory_.one_process());
    throw;
  }
}

void Engine::abort(const std::string& why, PhaseSync::Cause cause) {
  sync_.abort(why, cause);
}

void Engine::complete_step(Op& op) {
  switch (op.kind) {
    case Op::Kind::all_reduce: return complete_all_reduce(op);
    case Op::Kind::exchange: return complete_exchange(op);
    case Op::Kind::reduce_pieces: return complete_reduce_pieces(op);
    case Op::Kind::barrier: return wait_for_all(op);
  }
}

void Engine::check_fingerprint(int peer, const Op& op) {
  if (segment_.line(peer).offers[op.parity].fingerprint == segment_.line(rank_).offers[op.parity].fingerprint) return;
  const size_t parity = op.record.sequence & 1;
  const watch::Record other = segment_.info(peer).records[parity];
  if (watch::differ_in_knowledge(op.record, other)) return;
  const bool first = rank_ < peer;
  const watch::Record before = segment_.info(rank_).records[parity ^ 1];
  sync_.fail(watch::mismatch_text(first ? rank_ : peer, first ? op.record : other, first ? peer : rank_,
                                  first ? other : op.record, before),
             watch::mismatch_fix(op.record, other));
}

void Engine::wait_for_all(const Op& op) {
  for (int i = 1; i < num_members(); ++i) {
    const int peer = member_after(i);
    sync_.wait(peer, op.arrival);
    check_fingerprint(peer, op);
  }
}

bool Engine::any_offer_has(uint32_t flag, const Op& op) const {
  for (const int peer : members_) {
    if ((offer_of(peer, op).flags & flag) != 0) return true;
  }
  return false;
}

char* Engine::reach(int peer, uint64_t location, int64_t bytes) {
  char* data = memory_.resolve(peer, location, bytes);
  if (data == nullptr) fail_for_wild_offer(peer);
  return data;
}

const char* Engine::reach_slot(int peer, const Op& op, uint64_t offset, int64_t bytes) {
  constexpr uint64_t kRoom = SegmentShape::kSlotBytes;
  if (offset > kRoom || uint64_t(bytes) > kRoom - offset) fail_for_wild_offer(peer);
  return segment_.slot(peer, op.parity) + offset;
}

void Engine::fail_for_wild_offer(int peer) {
  sync_.fail(c10::str("rank ", peer, " offers memory that it does not share in ", watch::describe(sync_.current())),
             "look at that rank: its memory is overwritten, or another program writes to the group's");
}

/// Where some of what this rank is about to use lies in memory of its peers.
std::optional<Visit> Engine::visit_for(const Op& op) {
  if (!any_offer_has(kInPlace, op)) return std::nullopt;
  return std::optional<Visit>(std::in_place, sync_);
}

/// Tells the peers that this rank has read what lies in their own memory. Those that have given up on this rank,
/// because it was stopped or slow, may have taken that memory back meanwhile: then what was read means nothing.
void Engine::finish_reading() {
  std::atomic_thread_fence(std::memory_order_acquire);
  sync_.check_usable();
  sync_.post();
}

void Engine::finish_round_trip(const Op& op) {
  // Slots have two parities, so their writer may go on; whatever peers read in place may not change before all are
  // done.
  if (!any_offer_has(kInPlace | kInStage, op)) return;
  finish_reading();
  sync_.wait_all();
}

}  // namespace serried::shm
