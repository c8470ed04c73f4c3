// Layout arithmetic against tensors cut by hand with at::chunk.
#include "serried/mesh/layout.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>

namespace serried {
namespace {

// Part `index` as at::chunk cuts, which gives fewer chunks than asked where there is nothing left.
at::Tensor oracle_chunk(const at::Tensor& x, int64_t parts, int64_t index, int64_t dim) {
  if (x.size(dim) == 0) return x;
  const auto chunks = x.chunk(parts, dim);
  return index < int64_t(chunks.size()) ? chunks[size_t(index)] : x.narrow(dim, x.size(dim), 0);
}

// What the rank holds, cut axis by axis.
at::Tensor oracle(at::Tensor x, const Placements& placements, const Position& at) {
  for (size_t axis = 0; axis < placements.size(); ++axis) {
    const Placement& placement = placements[axis];
    if (!placement.is_shard()) continue;
    std::vector<at::Tensor> parts;
    if (placement.is_balanced()) {
      // tensor_split's chunks differ by at most one, too.
      const auto chunks = x.tensor_split(2 * at.mesh_shape[axis], placement.dim());
      const size_t rank = size_t(at.coordinate[axis]);
      x = at::cat({chunks[rank], chunks[chunks.size() - 1 - rank]}, placement.dim());
      continue;
    }
    for (const at::Tensor& piece : x.chunk(placement.split_factor(), placement.dim())) {
      parts.push_back(oracle_chunk(piece, at.mesh_shape[axis], at.coordinate[axis], placement.dim()));
    }
    x = at::cat(parts, placement.dim());
  }
  return x;
}

std::vector<int64_t> indices_of(const std::vector<Span>& spans) {
  std::vector<int64_t> indices;
  for (const Span& span : spans) {
    for (int64_t i = span.begin; i < span.end(); ++i) indices.push_back(i);
  }
  return indices;
}

std::vector<int64_t> values_of(const at::Tensor& x) {
  const at::Tensor flat = x.contiguous();
  return {flat.const_data_ptr<int64_t>(), flat.const_data_ptr<int64_t>() + flat.numel()};
}

void expect_well_formed(const std::vector<Span>& spans) {
  for (size_t i = 0; i < spans.size(); ++i) {
    EXPECT_GT(spans[i].size, 0);
    if (i > 0) EXPECT_GT(spans[i].begin, spans[i - 1].end());
  }
}

// One dim of every size up to three times the number of ranks.
void check_line(const Placements& placements, const Sizes& shape) {
  int64_t num_ranks = 1;
  for (int64_t size : shape) num_ranks *= size;
  for (int64_t size = 0; size <= 3 * num_ranks; ++size) {
    std::vector<int64_t> all;
    for (int64_t rank = 0; rank < num_ranks; ++rank) {
      const auto coordinate = coordinate_of(rank, shape);
      const Position at{shape, coordinate};
      const std::vector<int64_t> expected = values_of(oracle(at::arange(size), placements, at));
      const auto spans = owned_spans(size, 0, placements, at);
      SCOPED_TRACE(c10::str(to_string(placements), " of ", size, " on rank ", rank, " of ", c10::Join("x", shape)));
      expect_well_formed(spans);
      EXPECT_EQ(indices_of(spans), expected);
      EXPECT_EQ(local_size(size, 0, placements, at), int64_t(expected.size()));
      EXPECT_EQ(local_sizes({size}, placements, at), c10::DimVector({int64_t(expected.size())}));
      const int64_t offset = local_offsets({size}, placements, at)[0];
      if (!expected.empty()) EXPECT_EQ(offset, expected.front());
      EXPECT_LE(offset, size);
      all.insert(all.end(), expected.begin(), expected.end());
    }
    std::sort(all.begin(), all.end());
    all.erase(std::unique(all.begin(), all.end()), all.end());
    EXPECT_EQ(int64_t(all.size()), size);  // nothing is lost
  }
}

TEST(Layout, ChunksAreTheFirstOnesFull) {
  const std::vector<Span> expected = {{0, 2}, {2, 2}, {4, 1}, {5, 0}};
  for (int64_t i = 0; i < 4; ++i) EXPECT_EQ(chunk(5, 4, i), expected[size_t(i)]);
  EXPECT_EQ(chunk(0, 3, 2), (Span{0, 0}));
}

TEST(Layout, OneAxisEqualsChunk) {
  for (int64_t ranks : {1, 2, 3, 4, 7}) {
    check_line({Shard(0)}, {ranks});
    check_line({Replicate()}, {ranks});
    check_line({BalancedShard(0)}, {ranks});
    for (int64_t split : {2, 3, 5}) check_line({StridedShard(0, split)}, {ranks});
  }
}

TEST(Layout, SeveralAxesCutOneDimFromLeftToRight) {
  for (const Sizes& shape : std::vector<Sizes>{{2, 2}, {2, 3}, {3, 2}, {4, 1}, {1, 4}}) {
    for (const char* text :
         {"S0 S0", "S0 R", "P S0", "S0/2 S0", "S0 S0/3", "S0/3 S0/2", "S0~ S0", "S0 S0~", "S0~ S0~", "S0/2 S0~"}) {
      check_line(parse_placements(text), shape);
    }
  }
  for (const Sizes& shape : std::vector<Sizes>{{2, 2, 2}, {2, 3, 2}, {3, 1, 2}}) {
    for (const char* text : {"S0 S0 S0", "S0 R S0", "S0/4 S0/2 S0", "S0 S0/2 S0", "S0/2 S0 S0/3"}) {
      check_line(parse_placements(text), shape);
    }
  }
}

TEST(Layout, NestedCutsOfFiveRowsOnTwoByTwo) {
  const Sizes shape = {2, 2};
  const std::vector<std::pair<int64_t, int64_t>> size_and_offset = {{2, 0}, {1, 2}, {1, 3}, {1, 4}};
  for (int64_t rank = 0; rank < 4; ++rank) {
    const auto coordinate = coordinate_of(rank, shape);
    const Position at{shape, coordinate};
    const Placements placements = {Shard(0), Shard(0)};
    EXPECT_EQ(local_sizes({5, 3}, placements, at), c10::DimVector({size_and_offset[size_t(rank)].first, 3}));
    EXPECT_EQ(local_offsets({5, 3}, placements, at), c10::DimVector({size_and_offset[size_t(rank)].second, 0}));
  }
}

TEST(Layout, SeveralDimsAreCutIndependently) {
  const Sizes shape = {2, 3, 2};
  for (const char* text : {"S0 S1 S2", "S2 S0 S0", "S1 R S1", "S1/2 S0 S1", "P S2 S2/3", "S1~ S0 S1", "S2~ S1~ S0~"}) {
    const Placements placements = parse_placements(text);
    for (const Sizes& global : std::vector<Sizes>{{5, 7, 3}, {0, 4, 1}, {1, 13, 6}}) {
      const at::Tensor x = at::arange(global[0] * global[1] * global[2]).view(global);
      for (int64_t rank = 0; rank < 12; ++rank) {
        const auto coordinate = coordinate_of(rank, shape);
        const Position at{shape, coordinate};
        const at::Tensor expected = oracle(x, placements, at);
        EXPECT_EQ(local_sizes(global, placements, at), c10::DimVector(expected.sizes())) << text << " rank " << rank;
        const auto offsets = local_offsets(global, placements, at);
        if (expected.numel() == 0) continue;
        EXPECT_EQ(x[offsets[0]][offsets[1]][offsets[2]].item<int64_t>(), expected[0][0][0].item<int64_t>());
      }
    }
  }
}

TEST(Layout, AStridedShardLetsALaterAxisCutFirst) {
  // 8 rows: tp halves them, dp halves each half. Rank (dp 0, tp 1) holds rows 4 and 5.
  const Placements placements = {StridedShard(0, 2), Shard(0)};
  const Sizes shape = {2, 2};
  const std::vector<Span> expected = {{0, 2}, {4, 2}, {2, 2}, {6, 2}};
  for (int64_t rank = 0; rank < 4; ++rank) {
    const auto coordinate = coordinate_of(rank, shape);
    EXPECT_EQ(owned_spans(8, 0, placements, {shape, coordinate}), std::vector<Span>{expected[size_t(rank)]});
  }
}

TEST(Layout, ABalancedShardHoldsAChunkFromEitherEnd) {
  const Sizes shape = {2};
  EXPECT_EQ(owned_spans(10, 0, {BalancedShard(0)}, {shape, Sizes{0}}), (std::vector<Span>{{0, 3}, {8, 2}}));
  EXPECT_EQ(owned_spans(10, 0, {BalancedShard(0)}, {shape, Sizes{1}}), (std::vector<Span>{{3, 5}}));
  for (int64_t size : {1, 3, 37, 64, 4096}) {
    for (int64_t ranks : {1, 2, 3, 4}) {
      const Sizes line = {ranks};
      int64_t all = 0, least = size, most = 0;
      for (int64_t rank = 0; rank < ranks; ++rank) {
        const int64_t part = local_size(size, 0, {BalancedShard(0)}, {line, Sizes{rank}});
        all += part;
        least = std::min(least, part);
        most = std::max(most, part);
      }
      EXPECT_EQ(all, size);
      EXPECT_LE(most - least, 1) << size << " over " << ranks;
    }
  }
}

TEST(Layout, EvenChunksDifferByAtMostOne) {
  const std::vector<Span> expected = {{0, 2}, {2, 2}, {4, 1}, {5, 1}};
  for (int64_t i = 0; i < 4; ++i) EXPECT_EQ(even_chunk(6, 4, i), expected[size_t(i)]);
  EXPECT_EQ(even_chunk(1, 4, 3), (Span{1, 0}));
  EXPECT_EQ(even_chunk(0, 4, 2), (Span{0, 0}));
}

TEST(Layout, AnEmptyPartBeginsWhereItWould) {
  const Sizes line = {4};
  EXPECT_EQ(local_offsets({5}, {Shard(0)}, {line, Sizes{3}}), c10::DimVector({5}));
  EXPECT_EQ(local_offsets({0}, {Shard(0)}, {line, Sizes{2}}), c10::DimVector({0}));
  EXPECT_EQ(local_offsets({2}, {StridedShard(0, 2)}, {line, Sizes{3}}), c10::DimVector({1}));
  EXPECT_EQ(local_offsets({0}, {StridedShard(0, 2)}, {line, Sizes{3}}), c10::DimVector({0}));
  EXPECT_EQ(local_offsets({1}, {BalancedShard(0)}, {line, Sizes{3}}), c10::DimVector({1}));
  EXPECT_EQ(local_offsets({0}, {BalancedShard(0)}, {line, Sizes{3}}), c10::DimVector({0}));
  EXPECT_TRUE(owned_spans(5, 0, {Shard(0)}, {line, Sizes{3}}).empty());
}

TEST(Layout, DenseStridesEqualThoseOfPreservedMemory) {
  const std::vector<at::Tensor> tensors = {
      at::empty({2, 3, 4}),
      at::empty({2, 3, 4}).permute({2, 0, 1}),
      at::empty({4, 1, 3}),
      at::empty({3, 1}).t(),
      at::empty({2, 1, 3, 5}, at::MemoryFormat::ChannelsLast),
      at::empty({2, 3, 1, 1}, at::MemoryFormat::ChannelsLast),
      at::empty({2, 0, 3}),
      at::empty({}),
  };
  for (const at::Tensor& x : tensors) {
    EXPECT_EQ(dense_strides(x.sizes(), x.strides()), c10::DimVector(x.strides())) << x.sizes() << x.strides();
  }
}

TEST(Layout, DenseStridesCloseGapsAndKeepOrder) {
  EXPECT_EQ(dense_strides({2, 3}, {1, 8}), c10::DimVector({1, 2}));
  EXPECT_EQ(dense_strides({2, 3}, {16, 2}), c10::DimVector({3, 1}));
  EXPECT_EQ(dense_strides({2, 5, 3}, {3, 0, 1}), c10::DimVector({3, 0, 1}));  // expanded
  EXPECT_EQ(dense_strides({2, 1, 3}, {3, 0, 1}), c10::DimVector({3, 1, 1}));
}

TEST(Layout, ContiguousStridesEqualTorch) {
  for (const Sizes& sizes : std::vector<Sizes>{{}, {0}, {3}, {2, 0, 3}, {4, 1, 3}, {2, 3, 4, 5, 6, 7}}) {
    EXPECT_EQ(contiguous_strides(sizes), c10::DimVector(at::empty(sizes).strides())) << sizes;
  }
}

TEST(Layout, CountsShardsAndSaysWhetherTheyAreEqual) {
  const Sizes shape = {2, 3};
  EXPECT_EQ(num_shards(0, {Shard(0), Shard(0)}, shape), 6);
  EXPECT_EQ(num_shards(1, {Shard(0), Shard(1)}, shape), 3);
  EXPECT_EQ(num_shards(0, {Replicate(), Partial()}, shape), 1);
  EXPECT_TRUE(is_even({12}, {Shard(0), Shard(0)}, shape));
  EXPECT_FALSE(is_even({10}, {Shard(0), Shard(0)}, shape));
  EXPECT_TRUE(is_even({10, 3}, {Shard(0), Shard(1)}, shape));
  EXPECT_FALSE(is_even({10, 4}, {Shard(0), Shard(1)}, shape));
  EXPECT_TRUE(is_even({0}, {Shard(0), Shard(0)}, shape));
  EXPECT_FALSE(is_even({6}, {StridedShard(0, 2), Replicate()}, shape));
  EXPECT_TRUE(is_even({5}, {Replicate(), Partial()}, shape));
  EXPECT_TRUE(is_even({6}, {BalancedShard(0), Replicate()}, shape));
  EXPECT_FALSE(is_even({7}, {BalancedShard(0), Replicate()}, shape));
  EXPECT_TRUE(is_even({12}, {Shard(0), BalancedShard(0)}, shape));
}

TEST(Layout, CoordinatesAreRowMajor) {
  EXPECT_EQ(coordinate_of(0, {2, 3, 4}), c10::DimVector({0, 0, 0}));
  EXPECT_EQ(coordinate_of(23, {2, 3, 4}), c10::DimVector({1, 2, 3}));
  EXPECT_EQ(coordinate_of(17, {2, 3, 4}), c10::DimVector({1, 1, 1}));
}

}  // namespace
}  // namespace serried
