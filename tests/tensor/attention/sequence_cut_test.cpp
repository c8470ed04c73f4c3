// Which calls of the kernel a cut sequence takes: every pair of positions once, and alike on all ranks.
#include "serried/tensor/attention/sequence_cut.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace serried::detail {
namespace {

// Adds 1 where calls let a query attend to a key; rows and columns are positions in the sequence.
void mark(const at::Tensor& seen, const std::vector<AttentionCall>& calls, const SequenceChunks& queries,
          const SequenceChunks& keys) {
  const auto positions = [](const SequenceChunks& chunks) {
    std::map<int64_t, int64_t> of_place;
    for (const SequenceChunk& chunk : chunks) {
      for (int64_t i = 0; i < chunk.size; ++i) of_place[chunk.place + i] = chunk.begin + i;
    }
    return of_place;
  };
  const auto rows = positions(queries), columns = positions(keys);
  for (const AttentionCall& call : calls) {
    for (int64_t q = 0; q < call.queries.size; ++q) {
      for (int64_t k = 0; k < (call.causal ? q + 1 : call.keys.size); ++k) {
        seen[rows.at(call.queries.begin + q)][columns.at(call.keys.begin + k)] += 1;
      }
    }
  }
}

at::Tensor expected_pairs(const Sizes& documents, bool causal) {
  std::vector<at::Tensor> blocks;
  for (int64_t size : documents) {
    const at::Tensor ones = at::ones({size, size}, at::kLong);
    blocks.push_back(causal ? ones.tril() : ones);
  }
  return at::block_diag(blocks);
}

at::Tensor pairs_of_ring(const SequenceCut& cut, bool causal) {
  at::Tensor seen = at::zeros({cut.length(), cut.length()}, at::kLong);
  for (int64_t rank = 0; rank < cut.num_ranks(); ++rank) {
    for (int64_t other = 0; other < cut.num_ranks(); ++other) {
      mark(seen, attention_calls(cut.chunks(rank), cut.chunks(other), causal), cut.chunks(rank), cut.chunks(other));
    }
  }
  return seen;
}

at::Tensor pairs_of_gather(const SequenceCut& cut, bool causal) {
  at::Tensor seen = at::zeros({cut.length(), cut.length()}, at::kLong);
  for (int64_t rank = 0; rank < cut.num_ranks(); ++rank) {
    mark(seen, attention_calls(cut.chunks(rank), cut.all_chunks(), causal), cut.chunks(rank), cut.all_chunks());
  }
  return seen;
}

TEST(SequenceCut, ComputesEveryPairOnce) {
  for (int64_t ranks : {1, 2, 3, 4}) {
    for (int64_t length : {1, 3, 8, 13}) {
      for (const bool causal : {false, true}) {
        const at::Tensor expected = expected_pairs({length}, causal);
        for (const Placement& placement : {Shard(2), BalancedShard(2)}) {
          const SequenceCut cut(length, placement, ranks);
          EXPECT_TRUE(at::equal(pairs_of_ring(cut, causal), expected)) << length << " " << placement << " " << ranks;
          EXPECT_TRUE(at::equal(pairs_of_gather(cut, causal), expected)) << length << " " << placement << " " << ranks;
        }
      }
    }
  }
}

TEST(SequenceCut, KeepsDocumentsApart) {
  for (int64_t ranks : {1, 2, 3}) {
    for (const Sizes& documents : std::vector<Sizes>{{5}, {1, 7}, {4, 1, 9, 2}, {6, 6}}) {
      const SequenceCut cut(documents, ranks);
      for (const bool causal : {false, true}) {
        EXPECT_TRUE(at::equal(pairs_of_ring(cut, causal), expected_pairs(documents, causal))) << documents;
        EXPECT_TRUE(at::equal(pairs_of_gather(cut, causal), expected_pairs(documents, causal))) << documents;
        at::Tensor seen = at::zeros({cut.length(), cut.length()}, at::kLong);
        mark(seen, attention_calls(cut.documents(), cut.documents(), causal), cut.documents(), cut.documents());
        EXPECT_TRUE(at::equal(seen, expected_pairs(documents, causal))) << documents;
      }
    }
  }
}

TEST(SequenceCut, TakesOneCallPerStepOfTheRing) {
  const SequenceCut cut(64, BalancedShard(2), 4);
  for (int64_t rank = 0; rank < 4; ++rank) {
    for (int64_t other = 0; other < 4; ++other) {
      const size_t calls = attention_calls(cut.chunks(rank), cut.chunks(other), true).size();
      EXPECT_EQ(calls, rank == other ? 3u : 1u) << rank << " " << other;
      EXPECT_EQ(attention_calls(cut.chunks(rank), cut.chunks(other), false).size(), 1u);
    }
    EXPECT_LE(attention_calls(cut.chunks(rank), cut.all_chunks(), true).size(), 4u);
  }
}

int64_t busiest(const SequenceCut& cut) {
  int64_t most = 0;
  for (int64_t rank = 0; rank < cut.num_ranks(); ++rank) {
    int64_t pairs = 0;
    for (const AttentionCall& call : attention_calls(cut.chunks(rank), cut.all_chunks(), true))
      pairs += num_pairs(call);
    most = std::max(most, pairs);
  }
  return most;
}

TEST(SequenceCut, TheBusiestOfFourBalancedRanksHasLessToDo) {
  for (int64_t length : {64, 4096}) {
    const SequenceCut balanced(length, BalancedShard(2), 4), in_order(length, Shard(2), 4);
    EXPECT_GE(double(busiest(in_order)), 1.4 * double(busiest(balanced))) << length;
    const double mean = double(length * (length + 1) / 2) / 4;
    EXPECT_LE(double(busiest(balanced)), 1.07 * mean) << length;
  }
  EXPECT_LE(double(busiest(SequenceCut(37, BalancedShard(2), 4))), 1.17 * 37 * 38 / 8);
}

}  // namespace
}  // namespace serried::detail
