// Which positions of a sequence each rank holds, and what its queries then have to do with the keys of another rank.
#pragma once

#include <vector>

#include "serried/mesh/layout.h"

namespace serried::detail {

/// A run of positions of one document.
struct SequenceChunk {
  int64_t begin = 0;  // in the sequence
  int64_t size = 0;
  int64_t document = 0;  // positions attend to their own document only
  int64_t place = 0;     // where the run begins in what holds it
  int64_t end() const { return begin + size; }
};
using SequenceChunks = std::vector<SequenceChunk>;

/// Queries that attend to keys by one call of the kernel: to all of them, or each to those up to its own.
struct AttentionCall {
  Span queries;  // places in what holds them
  Span keys;
  bool causal = false;
  bool operator==(const AttentionCall&) const = default;
};

/// The calls for all pairs of chunks; those that a causal mask or the documents empty are left out, and neighbours are
/// joined. A causal pair of chunks is full, a square or empty, since both lists are cut at the same positions.
std::vector<AttentionCall> attention_calls(const SequenceChunks& queries, const SequenceChunks& keys, bool causal);

/// Pairs of a query and a key that a call computes: what attention costs.
int64_t num_pairs(const AttentionCall& call);

/// A sequence over the ranks of an axis. The same value on each of them.
class SequenceCut {
 public:
  /// By a placement along it, Shard or BalancedShard.
  SequenceCut(int64_t length, const Placement& placement, int64_t num_ranks);
  /// Documents one after the other; each of them is cut as BalancedShard cuts.
  SequenceCut(const Sizes& documents, int64_t num_ranks);

  int64_t length() const { return length_; }
  int64_t num_ranks() const { return int64_t(chunks_.size()); }
  /// What `rank` holds, in its order; ascending, empty ones left out.
  const SequenceChunks& chunks(int64_t rank) const { return chunks_.at(size_t(rank)); }
  /// The same of all ranks, in the order of the sequence; a chunk's place is its position.
  const SequenceChunks& all_chunks() const { return all_chunks_; }
  /// One chunk per document, for who has the whole sequence.
  const SequenceChunks& documents() const { return documents_; }
  /// How many positions `rank` holds, and the most that any rank does.
  int64_t size(int64_t rank) const;
  int64_t largest_size() const;
  /// Whether ranks have about as much to do under a causal mask.
  bool is_balanced() const { return is_balanced_; }

 private:
  void add_document(int64_t begin, int64_t size, const Placement& placement, int64_t num_ranks);
  void finish();

  int64_t length_ = 0;
  bool is_balanced_ = true;
  std::vector<SequenceChunks> chunks_;  // per rank
  SequenceChunks all_chunks_;
  SequenceChunks documents_;
};

}  // namespace serried::detail
