// all_reduce in three ways: small through slots, in place where peers can reach the tensors, else in staged chunks.
//
// Every way adds in rank order, element by element, so that all ranks get the same bits whatever the size.
#include <algorithm>
#include <cstring>

#include "serried/comm/backends/shm/engine.h"

namespace serried::shm {
namespace {

// Above this, one rank reducing a slice for all beats every rank reducing everything.
constexpr int64_t kMaxSlotBytes = 16 << 10;

// What one rank reduces before handing it on: stays in the first-level cache.
constexpr int64_t kBlockBytes = 8 << 10;

struct Slice {
  int64_t begin = 0;
  int64_t end = 0;
};

/// Rank `index`'s share of `count` elements; shares start at cache lines so that ranks do not write to one line.
Slice slice_of(int64_t count, int64_t element_bytes, int num_ranks, int index) {
  const int64_t unit = std::max<int64_t>(1, 64 / element_bytes);
  const int64_t share = ((count + num_ranks - 1) / num_ranks + unit - 1) / unit * unit;
  const int64_t begin = std::min(count, share * index);
  return {.begin = begin, .end = std::min(count, begin + share)};
}

}  // namespace

void Engine::arrive_all_reduce(Op& op) {
  const int64_t bytes = op.count * op.element_bytes;
  if (bytes <= kMaxSlotBytes) {
    if (bytes > 0) std::memcpy(segment_.slot(rank_, op.parity), op.input, bytes);
    return publish(op, kInSlot, 0, 0);
  }
  const uint64_t input = memory_.locate(op.input);
  const uint64_t output = memory_.locate(op.output);
  if (memory_.reachable(input)) return publish(op, kInPlace, input, output);
  stage_slices(op, 0);
  publish(op, kInStage, input, output);
}

void Engine::complete_all_reduce(Op& op) {
  wait_for_all(op);
  if (op.count * op.element_bytes <= kMaxSlotBytes) return reduce_slots(op);
  bool reachable = true;
  for (const int peer : members_) {
    const Offer offer = offer_of(peer, op);
    reachable &= memory_.reachable(offer.address) && memory_.reachable(offer.extent);
  }
  if (reachable) return reduce_in_place_of_all(op);
  reduce_in_chunks(op);
}

void Engine::reduce_slots(Op& op) {
  c10::SmallVector<const void*, 16> sources;
  for (const int peer : members_) sources.push_back(segment_.slot(peer, op.parity));
  op.kernel(op.output, sources.data(), num_members(), op.count);
}

void Engine::reduce_in_place_of_all(Op& op) {
  const int n = num_members();
  const Slice mine = slice_of(op.count, op.element_bytes, n, index_);
  c10::SmallVector<const char*, 16> inputs;
  c10::SmallVector<char*, 16> outputs;
  for (const int peer : members_) {
    const Offer offer = offer_of(peer, op);
    inputs.push_back(reach(peer, offer.address, op.count * op.element_bytes));
    outputs.push_back(reach(peer, offer.extent, op.count * op.element_bytes));
  }
  c10::SmallVector<const void*, 16> sources;
  const int64_t block = kBlockBytes / op.element_bytes;
  for (int64_t begin = mine.begin; begin < mine.end; begin += block) {
    // One per block: a peer that gives up meanwhile waits no longer than for that.
    const Visit visit(sync_);
    const int64_t count = std::min(block, mine.end - begin);
    const int64_t offset = begin * op.element_bytes;
    sources.clear();
    for (const char* input : inputs) sources.push_back(input + offset);
    char* const result = outputs[index_] + offset;
    op.kernel(result, sources.data(), n, count);
    for (int i = 1; i < n; ++i) {
      std::memcpy(outputs[place_after(i)] + offset, result, count * op.element_bytes);
    }
  }
  finish_reading();
  sync_.wait_all();
}

void Engine::stage_slices(const Op& op, int64_t chunk) {
  const int n = num_members();
  const int64_t chunk_elements = SegmentShape::kStageBytes / op.element_bytes;
  const int64_t begin = chunk * chunk_elements;
  const int64_t count = std::min(chunk_elements, op.count - begin);
  char* stage = segment_.stage(rank_, int(chunk & 1));
  // Only what the peers reduce: the own slice is read from the tensor itself.
  for (int i = 1; i < n; ++i) {
    const Slice slice = slice_of(count, op.element_bytes, n, place_after(i));
    std::memcpy(stage + slice.begin * op.element_bytes, op.input + (begin + slice.begin) * op.element_bytes,
                (slice.end - slice.begin) * op.element_bytes);
  }
}

void Engine::reduce_in_chunks(Op& op) {
  const int n = num_members();
  const int64_t chunk_elements = SegmentShape::kStageBytes / op.element_bytes;
  const int64_t num_chunks = (op.count + chunk_elements - 1) / chunk_elements;
  const bool staged = (offer_of(rank_, op).flags & kInStage) != 0;
  c10::SmallVector<const void*, 16> sources;
  for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
    const int64_t begin = chunk * chunk_elements;
    const int64_t count = std::min(chunk_elements, op.count - begin);
    if (chunk > 0) {
      sync_.post();
    }
    // The stage of the next chunk is free: all peers have finished with the chunk before this one.
    if (staged && chunk + 1 < num_chunks) stage_slices(op, chunk + 1);
    if (chunk > 0) sync_.wait_all();

    const Slice mine = slice_of(count, op.element_bytes, n, index_);
    const int64_t mine_offset = mine.begin * op.element_bytes;
    sources.clear();
    for (const int peer : members_) {
      const Offer offer = offer_of(peer, op);
      const char* contribution = segment_.stage(peer, int(chunk & 1));
      if (peer == rank_)
        contribution = op.input + begin * op.element_bytes;
      else if ((offer.flags & kInPlace) != 0) {
        contribution = reach(peer, offer.address, op.count * op.element_bytes) + begin * op.element_bytes;
      }
      sources.push_back(contribution + mine_offset);
    }
    char* result = segment_.result(rank_) + mine_offset;
    {
      const std::optional<Visit> visit = visit_for(op);
      op.kernel(result, sources.data(), n, mine.end - mine.begin);
    }
    finish_reading();
    char* output = op.output + begin * op.element_bytes;
    std::memcpy(output + mine_offset, result, (mine.end - mine.begin) * op.element_bytes);
    for (int i = 1; i < n; ++i) {
      const int peer = member_after(i);
      const Slice theirs = slice_of(count, op.element_bytes, n, place_after(i));
      const int64_t offset = theirs.begin * op.element_bytes;
      sync_.wait(peer, sync_.phase());
      std::memcpy(output + offset, segment_.result(peer) + offset, (theirs.end - theirs.begin) * op.element_bytes);
    }
  }
}

}  // namespace serried::shm
