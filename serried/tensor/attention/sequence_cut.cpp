// Pairs of chunks, sorted out by their positions.
#include "serried/tensor/attention/sequence_cut.h"

#include <c10/util/Exception.h>

#include <algorithm>

namespace serried::detail {
namespace {

// What one chunk of queries attends to.
struct Reach {
  std::vector<Span> full;  // places of keys, neighbours joined
  bool square = false;
  Span square_keys = {};
  bool operator==(const Reach&) const = default;
};

void add_full(std::vector<Span>& spans, const Span& span) {
  if (!spans.empty() && spans.back().end() == span.begin) {
    spans.back().size += span.size;
  } else {
    spans.push_back(span);
  }
}

Reach reach_of(const SequenceChunk& queries, const SequenceChunks& keys, bool causal) {
  Reach reach;
  for (const SequenceChunk& chunk : keys) {
    if (chunk.document != queries.document || chunk.size == 0) continue;
    if (!causal || chunk.end() <= queries.begin) {
      add_full(reach.full, {chunk.place, chunk.size});
      continue;
    }
    if (chunk.begin >= queries.end()) continue;
    TORCH_INTERNAL_ASSERT(chunk.begin == queries.begin && chunk.size == queries.size);
    reach.square = true;
    reach.square_keys = {chunk.place, chunk.size};
  }
  return reach;
}

}  // namespace

std::vector<AttentionCall> attention_calls(const SequenceChunks& queries, const SequenceChunks& keys, bool causal) {
  std::vector<AttentionCall> calls;
  std::vector<std::pair<Span, std::vector<Span>>> full;  // of queries in a row that reach the same keys
  for (const SequenceChunk& chunk : queries) {
    if (chunk.size == 0) continue;
    const Reach reach = reach_of(chunk, keys, causal);
    const Span places{chunk.place, chunk.size};
    if (reach.square) calls.push_back({places, reach.square_keys, true});
    if (reach.full.empty()) continue;
    if (!full.empty() && full.back().first.end() == places.begin && full.back().second == reach.full) {
      full.back().first.size += places.size;
    } else {
      full.emplace_back(places, reach.full);
    }
  }
  for (const auto& [places, spans] : full) {
    for (const Span& span : spans) calls.push_back({places, span, false});
  }
  return calls;
}

int64_t num_pairs(const AttentionCall& call) {
  return call.causal ? call.queries.size * (call.queries.size + 1) / 2 : call.queries.size * call.keys.size;
}

SequenceCut::SequenceCut(int64_t length, const Placement& placement, int64_t num_ranks)
    : is_balanced_(placement.is_balanced()), chunks_(size_t(num_ranks)) {
  add_document(0, length, placement, num_ranks);
  finish();
}

SequenceCut::SequenceCut(const Sizes& documents, int64_t num_ranks) : chunks_(size_t(num_ranks)) {
  for (const int64_t size : documents) add_document(length_, size, BalancedShard(0), num_ranks);
  finish();
}

// Chunks are those that squares are made of: the two of a balanced cut stay apart where they meet.
void SequenceCut::add_document(int64_t begin, int64_t size, const Placement& placement, int64_t num_ranks) {
  const int64_t document = int64_t(documents_.size());
  const int64_t num_chunks = placement.is_balanced() ? 2 * num_ranks : num_ranks;
  for (int64_t rank = 0; rank < num_ranks; ++rank) {
    std::vector<Span> spans = {chunk(size, num_ranks, rank)};
    if (placement.is_balanced()) {
      spans = {even_chunk(size, num_chunks, rank), even_chunk(size, num_chunks, num_chunks - 1 - rank)};
    }
    for (const Span& span : spans) {
      if (span.size > 0) chunks_[size_t(rank)].push_back({begin + span.begin, span.size, document, 0});
    }
  }
  documents_.push_back({begin, size, document, begin});
  length_ += size;
}

void SequenceCut::finish() {
  for (SequenceChunks& of_rank : chunks_) {
    int64_t place = 0;
    for (SequenceChunk& chunk : of_rank) {
      chunk.place = place;
      place += chunk.size;
      all_chunks_.push_back(chunk);
      all_chunks_.back().place = chunk.begin;
    }
  }
  std::sort(all_chunks_.begin(), all_chunks_.end(),
            [](const SequenceChunk& a, const SequenceChunk& b) { return a.begin < b.begin; });
}

int64_t SequenceCut::size(int64_t rank) const {
  const SequenceChunks& own = chunks(rank);
  return own.empty() ? 0 : own.back().place + own.back().size;
}

int64_t SequenceCut::largest_size() const {
  int64_t largest = 0;
  for (int64_t rank = 0; rank < num_ranks(); ++rank) largest = std::max(largest, size(rank));
  return largest;
}

}  // namespace serried::detail
