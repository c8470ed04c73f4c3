// The cost model's arithmetic.
#include "serried/spmd/cost.h"

#include <gtest/gtest.h>

#include <cmath>

#include "serried/spmd/plan.h"
#include "serried/spmd/redistribute.h"

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

TEST(Cost, ABackendMayHaveAModelOfItsOwn) {
  const uint64_t version = plans_version();
  set_cost_model("carrier pigeon", {.latency = 1e9});
  EXPECT_GT(plans_version(), version);
  EXPECT_EQ(cost_model("carrier pigeon").latency, 1e9);
  EXPECT_EQ(cost_model("gloo").latency, CostModel().latency);
  EXPECT_EQ(cost_model().latency, CostModel().latency);
  set_cost_model({.latency = 3});
  EXPECT_EQ(cost_model("carrier pigeon").latency, 1e9) << "its own stays";
  EXPECT_EQ(cost_model("gloo").latency, 3);
  reset_cost_model("carrier pigeon");
  EXPECT_EQ(cost_model("carrier pigeon").latency, 3);
  set_cost_model({});
}

// Over a slow axis one gather of much is better than two, over a fast one it does not matter.
TEST(Cost, StepsGoByTheModelOfTheirAxis) {
  const Placements from{Shard(0), Partial()}, to{Replicate(), Shard(0)};
  const CostModel fast{.latency = 0.1}, slow{.latency = 0.1, .bandwidth = 1};
  const auto first_axis = [&](const CostModel& a, const CostModel& b) {
    return redistribution({64, 64}, from, to, {2, 2}, {a, b}).front().axes.front();
  };
  EXPECT_EQ(first_axis(slow, fast), 1) << "the sum is cut first, so that the slow axis gathers less";
  EXPECT_EQ(first_axis(fast, slow), first_axis(fast, fast));
}

}  // namespace
}  // namespace serried::spmd
