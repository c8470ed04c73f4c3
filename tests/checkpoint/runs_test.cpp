// Runs of bytes against the indices that a rank owns, one by one.
#include "serried/checkpoint/runs.h"

#include <gtest/gtest.h>

#include "serried/checkpoint/blocks.h"
#include "tests/support/on_mesh.h"

namespace serried::checkpoint::detail {
namespace {

using serried::testing::placement_lists;

// Where each element of the part lies in the whole, by walking all indices.
std::vector<int64_t> expected_places(const Sizes& sizes, const Placements& placements, const Position& at) {
  std::vector<std::vector<int64_t>> owned;
  for (size_t dim = 0; dim < sizes.size(); ++dim) {
    owned.emplace_back();
    for (const Span& span : owned_spans(sizes[dim], int64_t(dim), placements, at)) {
      for (int64_t i = span.begin; i < span.end(); ++i) owned.back().push_back(i);
    }
  }
  std::vector<int64_t> places = {0};
  for (size_t dim = 0; dim < sizes.size(); ++dim) {
    std::vector<int64_t> longer;
    for (int64_t place : places) {
      for (int64_t index : owned[dim]) longer.push_back(place * sizes[dim] + index);
    }
    places = longer;
  }
  return places;
}

TEST(CheckpointRuns, CoverExactlyWhatARankOwnsInItsOrder) {
  const Placements options = {Replicate(), Shard(0), Shard(1), Shard(2), StridedShard(0, 2), StridedShard(1, 2)};
  const Sizes mesh = {2, 3};
  int checked = 0;
  for (const Sizes& sizes : {Sizes{7, 5, 3}, Sizes{4, 6, 2}, Sizes{1, 5, 2}, Sizes{3, 0, 2}}) {
    for (const Placements& placements : placement_lists(options, 2)) {
      for (int64_t rank = 0; rank < 6; ++rank) {
        const c10::DimVector coordinate = coordinate_of(rank, mesh);
        const Position at{mesh, coordinate};
        std::vector<int64_t> places;
        int64_t last_end = -1;
        for_each_run(Region::of(sizes, placements, at), 4, [&](const auto& run) {
          EXPECT_EQ(run.in_part, int64_t(places.size()) * 4);
          EXPECT_NE(run.in_file, last_end) << "runs that touch are one";
          last_end = run.in_file + run.num_bytes;
          for (int64_t byte = run.in_file; byte < last_end; byte += 4) places.push_back(byte / 4);
        });
        EXPECT_EQ(places, expected_places(sizes, placements, at)) << to_string(placements) << " rank " << rank;
        ++checked;
      }
    }
  }
  EXPECT_EQ(checked, 4 * 36 * 6);
}

TEST(CheckpointRuns, ANumberIsOneRun) {
  int count = 0;
  for_each_run(Region::whole({}), 8, [&](const auto& run) {
    EXPECT_EQ(run.num_bytes, 8);
    ++count;
  });
  EXPECT_EQ(count, 1);
}

TEST(BlockHashes, OnlyBlocksThatAreSeenWholeAreHashed) {
  std::string bytes;
  for (int i = 0; i < 25; ++i) bytes += char(i);
  BlockHasher hasher({.file_bytes = 25, .block_bytes = 10});
  hasher.see(0, bytes.data(), 4);
  hasher.see(4, bytes.data() + 4, 9);    // the rest of block 0, the begin of block 1
  hasher.see(14, bytes.data() + 14, 6);  // a byte of block 1 is missing
  hasher.see(20, bytes.data() + 20, 5);
  ASSERT_EQ(hasher.hashes().size(), 2u);
  EXPECT_EQ(hasher.hashes().at(0), hash_of(bytes.data(), 10));
  EXPECT_EQ(hasher.hashes().at(2), hash_of(bytes.data() + 20, 5));
}

}  // namespace
}  // namespace serried::checkpoint::detail
