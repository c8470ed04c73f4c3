// Collectives that move pieces between ranks: all_gather, all_to_all, broadcast, gather, scatter, and the reductions
// of pieces (reduce_scatter, reduce). A rank offers one piece to each peer; the peers come and take theirs.
#include <algorithm>
#include <cstring>

#include <c10/util/StringUtil.h>

#include "serried/comm/backends/shm/engine.h"
#include "serried/comm/collectives/rows.h"

namespace serried::shm {
namespace {

// More than any machine has: a size beyond it is no size.
constexpr uint64_t kMaxPieceBytes = uint64_t(1) << 42;

bool same_for_all(const Pieces& offers) {
  return offers.list.empty() && offers.stride == 0;
}

}  // namespace

void Engine::arrive_with_pieces(Op& op) {
  const Pieces& offers = op.offers;
  const int n = world_size();
  int64_t total = 0;
  if (same_for_all(offers))
    total = offers.bytes;
  else
    for (int peer = 0; peer < n; ++peer) total += offers.at(peer).bytes;
  if (total <= SegmentShape::kSlotBytes) return copy_to_slot(op);

  bool reachable = true;
  if (offers.list.empty()) reachable = memory_.reachable(memory_.locate(offers.base));
  for (const Piece& piece : offers.list) reachable &= memory_.reachable(memory_.locate(piece.data));
  uint32_t flags = reachable ? kInPlace : kInStage;
  if (!offers.list.empty()) {
    flags |= kInTable;
    Piece* table = segment_.table(rank_, op.parity);
    for (int peer = 0; peer < n; ++peer) {
      const Piece piece = offers.at(peer);
      table[peer] = {.data = reinterpret_cast<char*>(memory_.locate(piece.data)), .bytes = piece.bytes};
    }
  } else if (offers.stride != 0) {
    flags |= kOnePerPeer;
  }
  if ((flags & kInStage) != 0) stage_pieces(op, 0);
  publish(op, flags, memory_.locate(offers.base), offers.list.empty() ? offers.bytes : offers.largest(n));
}

void Engine::copy_to_slot(Op& op) {
  const Pieces& offers = op.offers;
  char* slot = segment_.slot(rank_, op.parity);
  if (same_for_all(offers)) {
    if (offers.bytes > 0) std::memcpy(slot, offers.base, offers.bytes);
    return publish(op, kInSlot, 0, offers.bytes);
  }
  if (offers.list.empty() && offers.only < 0 && offers.stride == offers.bytes) {
    if (offers.bytes > 0) std::memcpy(slot, offers.base, offers.bytes * world_size());
    return publish(op, kInSlot | kOnePerPeer, 0, offers.bytes);
  }
  Piece* table = segment_.table(rank_, op.parity);
  int64_t offset = 0;
  for (int peer = 0; peer < world_size(); ++peer) {
    const Piece piece = offers.at(peer);
    table[peer] = {.data = reinterpret_cast<char*>(offset), .bytes = piece.bytes};
    if (piece.bytes > 0) std::memcpy(slot + offset, piece.data, piece.bytes);
    offset += piece.bytes;
  }
  publish(op, kInSlot | kInTable, 0, 0);
}

int64_t Engine::piece_chunk(bool same) const {
  // Whole cache lines, so that elements of any dtype stay whole.
  const int64_t round = segment_.round_bytes();
  return same ? round : std::min(round, SegmentShape::kStageBytes / world_size() / 64 * 64);
}

void Engine::stage_pieces(const Op& op, int64_t round) {
  const bool same = same_for_all(op.offers);
  const int64_t chunk = piece_chunk(same);
  char* stage = segment_.stage(rank_, int(round & 1));
  for (const int peer : members_) {
    // The own piece never leaves this rank.
    if (!same && peer == rank_) continue;
    const Piece piece = op.offers.at(same ? std::max(op.offers.only, 0) : peer);
    const int64_t begin = std::min(piece.bytes, round * chunk);
    const int64_t bytes = std::min(chunk, piece.bytes - begin);
    if (bytes > 0) std::memcpy(stage + (same ? 0 : peer * chunk), piece.data + begin, bytes);
    if (same) return;
  }
}

int64_t Engine::num_rounds(const Op& op) {
  int64_t rounds = 0;
  for (const int peer : members_) {
    const Offer offer = offer_of(peer, op);
    if ((offer.flags & kInStage) == 0) continue;
    if (offer.extent > kMaxPieceBytes) fail_for_wild_offer(peer);
    const int64_t chunk = piece_chunk((offer.flags & (kInTable | kOnePerPeer)) == 0);
    rounds = std::max<int64_t>(rounds, (int64_t(offer.extent) + chunk - 1) / chunk);
  }
  return rounds;
}

/// The piece that `peer` offers this rank: `data` is a slot offset or a location, by the flags of the offer.
Piece Engine::offered_by(int peer, const Offer& offer, const Op& op) const {
  if ((offer.flags & kInTable) != 0) return read_once(segment_.table(peer, op.parity)[rank_]);
  const uint64_t skip = (offer.flags & kOnePerPeer) != 0 ? rank_ * offer.extent : 0;
  return {.data = reinterpret_cast<char*>(offer.address + skip), .bytes = int64_t(offer.extent)};
}

void Engine::check_size(int peer, int64_t offered, int64_t expected) {
  if (offered == expected) return;
  sync_.fail(c10::str("rank ", peer, " gives ", offered, " bytes where rank ", rank_, " expects ", expected, " in ",
                      watch::describe(sync_.current())),
             "let the sizes that a rank sends and its peer expects agree");
}

/// Bytes [begin, begin + bytes) of what `peer` offers, where they belong.
void Engine::lay_down(int peer, const Op& op, const char* from, int64_t begin, int64_t bytes) const {
  const Piece sink = op.sinks.at(peer);
  if (op.rows.empty()) {
    std::memcpy(sink.data + begin, from, bytes);
    return;
  }
  const detail::RowTable table{op.rows, world_size(), op.element_bytes};
  detail::place_rows(table, peer, {.data = from, .begin = begin, .end = begin + bytes}, sink.data);
}

void Engine::pull(int peer, const Op& op) {
  const Piece sink = op.sinks.at(peer);
  const Offer offer = offer_of(peer, op);
  const Piece offered = offered_by(peer, offer, op);
  check_size(peer, offered.bytes, sink.bytes);
  if (sink.bytes == 0 || (offer.flags & kInStage) != 0) return;
  const uint64_t location = reinterpret_cast<uint64_t>(offered.data);
  if ((offer.flags & kInSlot) != 0) {
    return lay_down(peer, op, reach_slot(peer, op, location, sink.bytes), 0, sink.bytes);
  }
  const char* from = reach(peer, location, sink.bytes);
  const Visit visit(sync_);
  lay_down(peer, op, from, 0, sink.bytes);
}

/// This rank's part of what `peer` has staged in `round`.
void Engine::pull_round(int peer, const Op& op, int64_t round) {
  const Offer offer = offer_of(peer, op);
  const Piece sink = op.sinks.at(peer);
  const bool same = (offer.flags & (kInTable | kOnePerPeer)) == 0;
  const int64_t chunk = piece_chunk(same);
  const int64_t begin = std::min(sink.bytes, round * chunk);
  if ((offer.flags & kInStage) == 0 || begin == sink.bytes) return;
  const char* stage = segment_.stage(peer, int(round & 1)) + (same ? 0 : rank_ * chunk);
  lay_down(peer, op, stage, begin, std::min(chunk, sink.bytes - begin));
}

void Engine::complete_exchange(Op& op) {
  const Piece own = op.sinks.at(rank_);
  if (own.bytes > 0 && own.data != op.offers.at(rank_).data) {
    lay_down(rank_, op, op.offers.at(rank_).data, 0, own.bytes);
  }
  for (int i = 1; i < num_members(); ++i) {
    const int peer = member_after(i);
    sync_.wait(peer, op.arrival);
    check_fingerprint(peer, op);
    if (op.sinks.only < 0 || op.sinks.only == peer) pull(peer, op);
  }
  const int64_t rounds = num_rounds(op);
  const bool staging = (offer_of(rank_, op).flags & kInStage) != 0;
  for (int64_t round = 0; round < rounds; ++round) {
    sync_.wait_all();
    // All peers have read the round before this one, so its half of the stage is free.
    if (staging && round + 1 < rounds) stage_pieces(op, round + 1);
    for (int i = 1; i < num_members(); ++i) pull_round(member_after(i), op, round);
    if (round + 1 < rounds) sync_.post();
  }
  finish_round_trip(op);
}

void Engine::complete_reduce_pieces(Op& op) {
  wait_for_all(op);
  const Piece result = op.sinks.at(rank_);
  const int64_t rounds = num_rounds(op);
  if (rounds == 0) reduce_block(op, 0, result.bytes);
  // Every rank walks through all rounds, with or without a result of its own.
  const int64_t block = piece_chunk(same_for_all(op.offers));
  const bool staging = (offer_of(rank_, op).flags & kInStage) != 0;
  for (int64_t round = 0; round < rounds; ++round) {
    sync_.wait_all();
    if (staging && round + 1 < rounds) stage_pieces(op, round + 1);
    const int64_t begin = std::min(result.bytes, round * block);
    reduce_block(op, begin, std::min(result.bytes, begin + block));
    if (round + 1 < rounds) sync_.post();
  }
  finish_round_trip(op);
}

/// Bytes [begin, end) of this rank's result.
void Engine::reduce_block(const Op& op, int64_t begin, int64_t end) {
  if (begin == end) return;
  c10::SmallVector<const void*, 16> sources;
  for (const int peer : members_) sources.push_back(contribution(peer, op, begin, end - begin));
  const std::optional<Visit> visit = visit_for(op);
  char* const result = op.sinks.at(rank_).data;
  const int64_t count = (end - begin) / op.element_bytes;
  const HostPart& part = op.part;
  if (part.reduction.kernel == nullptr) return op.kernel(result + begin, sources.data(), num_members(), count);
  const int64_t first = begin / op.element_bytes;
  const int64_t out_bytes = part.num_ranks == 0 ? part.reduction.element_bytes : op.element_bytes;
  const char* before = part.before == nullptr ? nullptr : part.before + first * part.reduction.element_bytes;
  part.reduction.kernel(result + first * out_bytes, before, sources.data(), num_members(), count, part.num_ranks);
}

/// What `peer` contributes to `bytes` of this rank's result, from byte `begin` on.
const char* Engine::contribution(int peer, const Op& op, int64_t begin, int64_t bytes) {
  if (peer == rank_) return op.offers.at(rank_).data + begin;
  const Offer offer = offer_of(peer, op);
  const Piece offered = offered_by(peer, offer, op);
  check_size(peer, offered.bytes, op.sinks.at(rank_).bytes);
  const uint64_t location = reinterpret_cast<uint64_t>(offered.data);
  if ((offer.flags & kInSlot) != 0) return reach_slot(peer, op, location, offered.bytes) + begin;
  if ((offer.flags & kInPlace) != 0) return reach(peer, location, offered.bytes) + begin;
  const bool same = (offer.flags & (kInTable | kOnePerPeer)) == 0;
  const int64_t chunk = piece_chunk(same);
  if ((offer.flags & kInStage) == 0 || bytes > chunk) fail_for_wild_offer(peer);
  return segment_.stage(peer, int(begin / chunk & 1)) + (same ? 0 : rank_ * chunk);
}

}  // namespace serried::shm
