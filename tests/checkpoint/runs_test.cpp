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

// Blocks of 12 bytes in leaves of 4, the last block of 5 bytes.
class LeafHashes : public ::testing::Test {
 protected:
  LeafHashes() {
    for (int i = 0; i < 29; ++i) bytes_ += char(3 * i);
  }
  uint64_t leaf(int64_t begin, int64_t end) const { return hash_of(bytes_.data() + begin, end - begin); }
  void see(int64_t begin, int64_t end) { hasher_.see(begin, bytes_.data() + begin, end - begin); }

  const BlockGrid grid_{.file_bytes = 29, .block_bytes = 12, .leaf_bytes = 4};
  BlockHasher hasher_{grid_};
  std::string bytes_;
};

TEST_F(LeafHashes, OfABlockTogetherAreItsHash) {
  const std::vector<uint64_t> first = {leaf(0, 4), leaf(4, 8), leaf(8, 12)}, last = {leaf(24, 28), leaf(28, 29)};
  EXPECT_EQ(hash_of_block(grid_, 0, bytes_.data()), hash_of(first.data(), 24));
  EXPECT_EQ(hash_of_block(grid_, 2, bytes_.data() + 24), hash_of(last.data(), 16));
  EXPECT_EQ(hash_of_leaves({7}), 7u) << "a block of one leaf has the hash of its bytes";
}

TEST_F(LeafHashes, AreKnownInWhateverOrderTheyAreSeen) {
  see(14, 20);  // the end of a leaf, and one
  see(8, 13);   // one, and the begin of that leaf
  EXPECT_TRUE(hasher_.hashes().empty());
  const BlockPart first = hasher_.part(0), second = hasher_.part(1);
  EXPECT_FALSE(first.knows(0) || first.knows(1));
  EXPECT_TRUE(first.knows(2));
  EXPECT_EQ(first.hashes()[2], leaf(8, 12));
  EXPECT_FALSE(second.knows(0)) << "a byte of it is missing, and they came in the wrong order";
  EXPECT_TRUE(second.knows(1));
  EXPECT_FALSE(second.knows(2));
  see(0, 3);
  see(3, 8);
  see(24, 29);
  ASSERT_EQ(hasher_.hashes().size(), 2u);
  EXPECT_EQ(hasher_.hashes().at(0), hash_of_block(grid_, 0, bytes_.data()));
  EXPECT_EQ(hasher_.hashes().at(2), hash_of_block(grid_, 2, bytes_.data() + 24));
}

}  // namespace
}  // namespace serried::checkpoint::detail
