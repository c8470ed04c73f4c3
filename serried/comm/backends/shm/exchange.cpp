// Collectives that move pieces between ranks: all_gather, all_to_all, broadcast, gather, scatter, and the reductions
// of pieces (reduce_scatter, reduce). A rank offers one piece to each peer; the peers come and take theirs.
#include <algorithm>
#include <cstring>

#include <c10/util/StringUtil.h>

#include "serried/comm/backends/shm/engine.h"
#include "serried/comm/backends/shm/offer_flags.h"

namespace serried::shm {
namespace {

// How much of each source is read at a time where sources must be copied before they are reduced.
constexpr int64_t kReadBlock = 128 << 10;

bool same_for_all(const Pieces& offers) {
  return offers.list.empty() && offers.stride == 0;
}

}  // namespace

void Engine::arrive_with_pieces(Op& op) {
  const Pieces& offers = op.offers;
  const int n = world_size();
  int64_t total = 0;
  if (same_for_all(offers)) total = offers.bytes;
  else for (int peer = 0; peer < n; ++peer) total += offers.at(peer).bytes;
  if (total <= SegmentShape::kSlotBytes) return copy_to_slot(op);

  const bool reachable = memory_.readable() || (offers.list.empty() && memory_.addressable(memory_.locate(offers.base)));
  const uint32_t way = reachable ? kInPlace : kInStage;
  uint32_t flags = offers.list.empty() ? way : way | kInTable;
  if (offers.list.empty() && offers.stride != 0) flags |= kOnePerPeer;
  if (!offers.list.empty()) {
    Piece* table = segment_.table(rank_, op.parity);
    for (int peer = 0; peer < n; ++peer) {
      const Piece piece = offers.at(peer);
      table[peer] = {.data = reinterpret_cast<char*>(memory_.locate(piece.data)), .bytes = piece.bytes};
    }
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
    std::memcpy(slot, offers.base, offers.bytes * world_size());
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
  return same ? SegmentShape::kStageBytes : SegmentShape::kStageBytes / world_size() / 64 * 64;
}

void Engine::stage_pieces(const Op& op, int64_t round) {
  const bool same = same_for_all(op.offers);
  const int64_t chunk = piece_chunk(same);
  char* stage = segment_.stage(rank_, int(round & 1));
  for (int peer = 0; peer < (same ? 1 : world_size()); ++peer) {
    const Piece piece = op.offers.at(same ? std::max(op.offers.only, 0) : peer);
    const int64_t begin = std::min(piece.bytes, round * chunk);
    const int64_t bytes = std::min(chunk, piece.bytes - begin);
    if (bytes > 0) std::memcpy(stage + peer * chunk, piece.data + begin, bytes);
  }
}

int64_t Engine::num_rounds(const Op& op) const {
  int64_t rounds = 0;
  for (int peer = 0; peer < world_size(); ++peer) {
    const Offer& offer = offer_of(peer, op);
    if ((offer.flags & kInStage) == 0) continue;
    const int64_t chunk = piece_chunk((offer.flags & (kInTable | kOnePerPeer)) == 0);
    rounds = std::max<int64_t>(rounds, (int64_t(offer.extent) + chunk - 1) / chunk);
  }
  return rounds;
}

/// The piece that `peer` offers this rank: `data` is a slot offset or a location, by the flags of the offer.
Piece Engine::offered_by(int peer, const Op& op) const {
  const Offer& offer = offer_of(peer, op);
  if ((offer.flags & kInTable) != 0) return segment_.table(peer, op.parity)[rank_];
  const uint64_t skip = (offer.flags & kOnePerPeer) != 0 ? rank_ * offer.extent : 0;
  return {.data = reinterpret_cast<char*>(offer.address + skip), .bytes = int64_t(offer.extent)};
}

void Engine::check_size(int peer, int64_t offered, int64_t expected) {
  if (offered == expected) return;
  sync_.fail(c10::str("rank ", peer, " gives ", offered, " bytes where rank ", rank_, " expects ", expected, " in ",
                      watch::describe(sync_.current())),
             "let the sizes that a rank sends and its peer expects agree");
}

void Engine::pull(int peer, const Op& op) {
  const Piece sink = op.sinks.at(peer);
  const Offer& offer = offer_of(peer, op);
  const Piece offered = offered_by(peer, op);
  check_size(peer, offered.bytes, sink.bytes);
  if (sink.bytes == 0 || (offer.flags & kInStage) != 0) return;
  if ((offer.flags & kInSlot) != 0) {
    std::memcpy(sink.data, segment_.slot(peer, op.parity) + reinterpret_cast<int64_t>(offered.data), sink.bytes);
    return;
  }
  if (!memory_.read(peer, reinterpret_cast<uint64_t>(offered.data), 0, sink.data, sink.bytes)) {
    sync_.fail_for_gone_peer(peer);
  }
}

void Engine::complete_exchange(Op& op) {
  const int n = world_size();
  const Piece own = op.sinks.at(rank_);
  if (own.bytes > 0 && own.data != op.offers.at(rank_).data) {
    std::memcpy(own.data, op.offers.at(rank_).data, own.bytes);
  }
  for (int i = 1; i < n; ++i) {
    const int peer = (rank_ + i) % n;
    sync_.wait(peer, op.arrival);
    check_fingerprint(peer, op);
    if (op.sinks.only < 0 || op.sinks.only == peer) pull(peer, op);
  }
  const int64_t rounds = num_rounds(op);
  for (int64_t round = 0; round < rounds; ++round) {
    sync_.wait_all();
    const bool staging = (offer_of(rank_, op).flags & kInStage) != 0;
    if (staging && round + 1 < rounds) stage_pieces(op, round + 1);
    for (int i = 1; i < n; ++i) {
      const int peer = (rank_ + i) % n;
      const Offer& offer = offer_of(peer, op);
      const Piece sink = op.sinks.at(peer);
      if ((offer.flags & kInStage) == 0 || sink.bytes == 0) continue;
      const bool same = (offer.flags & (kInTable | kOnePerPeer)) == 0;
      const int64_t chunk = piece_chunk(same);
      const int64_t begin = std::min(sink.bytes, round * chunk);
      const char* stage = segment_.stage(peer, int(round & 1)) + (same ? 0 : rank_ * chunk);
      std::memcpy(sink.data + begin, stage, std::min(chunk, sink.bytes - begin));
    }
    if (round + 1 < rounds) sync_.post();
  }
  finish_round_trip(op);
}

void Engine::reduce_sources(const Op& op, int64_t begin, int64_t end, const std::vector<Piece>& sources) {
  c10::SmallVector<const void*, 16> pointers(world_size());
  for (int peer = 0; peer < world_size(); ++peer) pointers[peer] = sources[peer].data;
  op.kernel(op.sinks.at(rank_).data + begin, pointers.data(), world_size(), (end - begin) / op.element_bytes);
}

void Engine::complete_reduce_pieces(Op& op) {
  wait_for_all(op);
  const int n = world_size();
  const Piece result = op.sinks.at(rank_);
  const int64_t rounds = num_rounds(op);
  // With staged sources the rounds give the blocks; every rank walks through all rounds, with or without a result.
  const bool same = same_for_all(op.offers);
  const int64_t block = rounds > 0 ? piece_chunk(same) : kReadBlock;
  const int64_t num_blocks = rounds > 0 ? rounds : (result.bytes + block - 1) / block;
  std::vector<Piece> sources(n);
  for (int64_t index = 0; index < num_blocks; ++index) {
    if (rounds > 0) sync_.wait_all();
    if (rounds > 0 && index + 1 < rounds && (offer_of(rank_, op).flags & kInStage) != 0) stage_pieces(op, index + 1);
    const int64_t begin = std::min(result.bytes, index * block);
    const int64_t end = std::min(result.bytes, begin + block);
    for (int peer = 0; peer < n && end > begin; ++peer) sources[peer] = source_block(peer, op, begin, end);
    if (end > begin) reduce_sources(op, begin, end, sources);
    if (rounds > 0 && index + 1 < rounds) sync_.post();
  }
  finish_round_trip(op);
}

/// Bytes [begin, end) of what `peer` contributes to this rank's result, at an address of this process.
Piece Engine::source_block(int peer, const Op& op, int64_t begin, int64_t end) {
  if (peer == rank_) return {.data = op.offers.at(rank_).data + begin, .bytes = end - begin};
  const Offer& offer = offer_of(peer, op);
  const Piece offered = offered_by(peer, op);
  check_size(peer, offered.bytes, op.sinks.at(rank_).bytes);
  const uint64_t location = reinterpret_cast<uint64_t>(offered.data);
  if ((offer.flags & kInSlot) != 0) return {.data = segment_.slot(peer, op.parity) + location + begin, .bytes = end - begin};
  if ((offer.flags & kInStage) != 0) {
    const bool same = (offer.flags & (kInTable | kOnePerPeer)) == 0;
    const int64_t chunk = piece_chunk(same);
    return {.data = segment_.stage(peer, int(begin / chunk & 1)) + (same ? 0 : rank_ * chunk), .bytes = end - begin};
  }
  if (memory_.addressable(location)) return {.data = memory_.resolve(peer, location) + begin, .bytes = end - begin};
  scratch_.resize(size_t(world_size()) * SegmentShape::kStageBytes);
  char* copy = scratch_.data() + peer * SegmentShape::kStageBytes;
  if (!memory_.read(peer, location, begin, copy, end - begin)) sync_.fail_for_gone_peer(peer);
  return {.data = copy, .bytes = end - begin};
}

}  // namespace serried::shm
