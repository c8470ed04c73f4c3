// The cost model's arithmetic.
#include "serried/spmd/cost.h"

#include <gtest/gtest.h>

#include <cmath>

namespace serried::spmd {
namespace {

TEST(Cost, BytesFollowTheCollective) {
  EXPECT_EQ(bytes_sent(Partial(), Replicate(), 800, 4), 1200);
  EXPECT_EQ(bytes_sent(Shard(0), Replicate(), 800, 4), 600);
  EXPECT_EQ(bytes_sent(Partial(), Shard(1), 800, 4), 600);
  EXPECT_EQ(bytes_sent(Shard(0), Shard(1), 800, 4), 150);
  EXPECT_EQ(bytes_sent(StridedShard(0, 2), Shard(0), 800, 4), 150);
}

TEST(Cost, WhatStaysOnTheRankSendsNothing) {
  EXPECT_EQ(bytes_sent(Replicate(), Shard(0), 800, 4), 0);
  EXPECT_EQ(bytes_sent(Replicate(), Partial(), 800, 4), 0);
  EXPECT_EQ(bytes_sent(Shard(0), Shard(0), 800, 4), 0);
  EXPECT_EQ(bytes_sent(Partial(), Replicate(), 800, 1), 0);
}

TEST(Cost, NothingChangesForFree) {
  EXPECT_EQ(move_cost(Shard(0), Shard(0), 1 << 20, 4), 0);
  EXPECT_EQ(move_cost(Partial("max"), Partial("max"), 1 << 20, 4), 0);
  EXPECT_EQ(move_cost(Shard(0), Partial(), 1 << 20, 1), 0);
}

TEST(Cost, ShardToPartialAndPartialToAnotherHaveNoWay) {
  EXPECT_TRUE(std::isinf(move_cost(Shard(0), Partial(), 8, 2)));
  EXPECT_TRUE(std::isinf(move_cost(Partial("max"), Partial(), 8, 2)));
}

TEST(Cost, LocalCopiesAreCheaperThanCollectives) {
  for (int64_t bytes : {0, 1024, 1 << 22}) {
    EXPECT_LT(move_cost(Replicate(), Shard(0), bytes, 4), move_cost(Shard(0), Shard(1), bytes, 4));
    EXPECT_LT(move_cost(Replicate(), Partial(), bytes, 4), move_cost(Partial(), Replicate(), bytes, 4));
    EXPECT_LE(move_cost(Partial(), Shard(0), bytes, 4), move_cost(Partial(), Replicate(), bytes, 4));
  }
}

TEST(Cost, TheModelCanBeReplaced) {
  const CostModel before = cost_model();
  set_cost_model({.latency = 10, .bandwidth = 1, .copy_bandwidth = 2, .copy_latency = 3});
  EXPECT_DOUBLE_EQ(move_cost(Shard(0), Replicate(), 8, 2), 10 + 4);
  EXPECT_DOUBLE_EQ(move_cost(Replicate(), Shard(0), 8, 2), 3 + 2);
  set_cost_model(before);
  EXPECT_DOUBLE_EQ(cost_model().latency, before.latency);
}

}  // namespace
}  // namespace serried::spmd
