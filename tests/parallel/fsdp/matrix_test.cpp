// Strategies in combination: twenty clipped steps of AdamW, captured as eager bit for bit, and as one process.
#include <gtest/gtest.h>

#include "serried/comm/groups/ranks.h"
#include "tests/parallel/combination.h"

namespace serried::testing {
namespace {

using namespace together;

using Tallies = std::map<std::string, int64_t>;

struct Expected {
  Nearness near = {};
  Tallies counts = {};  // of a step
  Tallies bytes = {};   // of some of them
};

void expect_traffic(const Trained& trained, const Expected& expected) {
  EXPECT_EQ(trained.counts, expected.counts);
  for (const auto& [name, bytes] : expected.bytes) EXPECT_EQ(trained.bytes.at(name), bytes) << name;
}

void expect_trains_like_one_process(const Combination& c, const Expected& expected) {
  SCOPED_TRACE(c10::str(c.replicas, " x ", c.dp, " x ", c.tp, c.by_ddp ? " DDP" : " FSDP"));
  Trained alone = train_alone(c);
  // The bits of a sum depend on how many threads work on it, and rank threads work alone.
  if (expected.near.of_all == 0) run_ranks(1, [&](const Group&) { alone = train_alone(c); });
  run_ranks(int(c.num_ranks()), [&](const Group& group) {
    const Trained eager = Trainer(c, group).train(/*is_captured=*/false);
    EXPECT_EQ(first_difference(eager, alone, expected.near), "");
    EXPECT_TRUE(same_on_all_ranks(eager.norms, group));
    expect_traffic(eager, expected);
    if (c.same_batches) return;  // looked at with other batches
    const Trained captured = Trainer(c, group).train(/*is_captured=*/true);
    EXPECT_EQ(first_difference(captured, eager, {.of_all = 0}), "");
    EXPECT_EQ(captured.replays, kSteps - 3) << captured.reason;
    EXPECT_EQ(captured.counts, eager.counts);
    EXPECT_EQ(captured.bytes, eager.bytes);
  });
}

constexpr int64_t kLayers = 2;
constexpr int64_t kBlocks = kLayers + 1;
constexpr int64_t kGathers = 2 * kBlocks - 2;  // twice per block, less the last of forward and the root
constexpr int64_t kMoves = 2 * kLayers + 1;    // of activations, by styles, in either direction
constexpr int64_t kLoss = 3;                   // two of softmax in forward, one in backward
constexpr int64_t kWholeLoss = 1;              // pending after that until it is read
// Of parameters that tensor parallel ranks all have: norms, biases behind a sum, positions.
constexpr int64_t kReplicated = kLayers * (4 + 2) + 2 + 1;

constexpr int64_t kTokens = 4 * gpt::kContext;
constexpr int64_t kActivation = kTokens * 24 * 8;
constexpr int64_t kLossBytes = kLoss * kTokens * 8 + 8;

TEST(Combinations, FullySharded) {
  const Tallies counts = {{"all_gather", kGathers}, {"reduce_scatter", kBlocks}, {"all_reduce", 1}};
  for (const int64_t dp : {2, 4}) {
    expect_trains_like_one_process({.dp = dp}, {.counts = counts, .bytes = {{"all_reduce", 8}}});
  }
}

TEST(Combinations, ReplicasOfShards) {
  expect_trains_like_one_process(
      {.replicas = 2, .dp = 2},
      {.counts = {{"all_gather", kGathers}, {"reduce_scatter", kBlocks}, {"all_reduce", kBlocks + 1}}});
}

TEST(Combinations, FullyShardedAndRecomputed) {
  expect_trains_like_one_process(
      {.dp = 4, .recomputes = true},
      {.counts = {{"all_gather", kGathers}, {"reduce_scatter", kBlocks}, {"all_reduce", 1}}});
}

TEST(Combinations, FullyShardedInLowPrecision) {
  expect_trains_like_one_process(
      {.dp = 2, .low = at::kBFloat16},
      {.near = {.of_all = 0.3}, .counts = {{"all_gather", kGathers}, {"reduce_scatter", kBlocks}, {"all_reduce", 1}}});
}

TEST(Combinations, FullyShardedWithAccumulation) {
  expect_trains_like_one_process(
      {.dp = 2, .num_micro = 3},
      {.counts = {{"all_gather", 3 * kGathers}, {"reduce_scatter", 3 * kBlocks}, {"all_reduce", 1}}});
  expect_trains_like_one_process(
      {.dp = 2, .num_micro = 3, .no_sync = true},
      {.counts = {{"all_gather", 3 * kGathers}, {"reduce_scatter", kBlocks}, {"all_reduce", 1}}});
}

TEST(Combinations, FullyShardedTimesTensorParallelWithUnevenRowsFusedProjectionsAndTiedHead) {
  expect_trains_like_one_process({.dp = 3, .tp = 2, .model = {.fused = true, .tied = true}},
                                 {.counts = {{"all_gather", kGathers},
                                             {"reduce_scatter", kBlocks},
                                             {"all_reduce", 2 * kMoves + kLoss + kWholeLoss + 2}},
                                  .bytes = {{"all_reduce", 2 * kMoves * kActivation + kLossBytes + 2 * 8}}});
}

TEST(Combinations, FullyShardedTimesSequenceAndLossParallel) {
  expect_trains_like_one_process({.dp = 2, .tp = 2, .by_sequence = true, .loss_parallel = true},
                                 {.counts = {{"all_gather", kGathers + 2 * kMoves},
                                             {"reduce_scatter", kBlocks + 2 * kMoves},
                                             {"all_reduce", kBlocks + kLoss + kWholeLoss + 2}}});
}

TEST(Combinations, DataParallelTimesTensorParallel) {
  expect_trains_like_one_process({.dp = 2, .tp = 2, .by_ddp = true},
                                 {.counts = {{"all_reduce", 2 * kMoves + kLoss + kWholeLoss + 1 + 1}}});
}

TEST(Combinations, DataParallelTimesSequenceAndLossParallel) {
  expect_trains_like_one_process({.dp = 2, .tp = 2, .by_ddp = true, .by_sequence = true, .loss_parallel = true},
                                 {.counts = {{"all_gather", 2 * kMoves},
                                             {"reduce_scatter", 2 * kMoves},
                                             {"all_reduce", kReplicated + kLoss + kWholeLoss + 1 + 1}},
                                  .bytes = {{"reduce_scatter", 2 * kMoves * kActivation}}});
}

TEST(Combinations, ReplicasOfShardsTimesTensorParallel) {
  expect_trains_like_one_process({.replicas = 2, .dp = 2, .tp = 2},
                                 {.counts = {{"all_gather", kGathers},
                                             {"reduce_scatter", kBlocks},
                                             {"all_reduce", 2 * kMoves + kLoss + kWholeLoss + kBlocks + 2}}});
}

TEST(Combinations, AllOfThemTogether) {
  // The second run of a block ends before its last reduction.
  constexpr int64_t kGathersAgain = 2 * kLayers, kScattersAgain = kLayers;
  expect_trains_like_one_process({.replicas = 2,
                                  .dp = 2,
                                  .tp = 2,
                                  .model = {.fused = true, .tied = true},
                                  .by_sequence = true,
                                  .loss_parallel = true,
                                  .recomputes = true,
                                  .num_micro = 2},
                                 {.counts = {{"all_gather", 2 * (kGathers + 2 * kMoves + kGathersAgain)},
                                             {"reduce_scatter", 2 * (kBlocks + 2 * kMoves + kScattersAgain)},
                                             {"all_reduce", 2 * (kBlocks + kLoss + kBlocks) + kWholeLoss + 2}}});
}

TEST(Combinations, TheSameBatchOnEveryRankTrainsBitwiseLikeOneProcess) {
  const Nearness near{.of_all = 0, .of_norms = 1e-5};
  const Tallies sharded = {{"all_gather", kGathers}, {"reduce_scatter", kBlocks}, {"all_reduce", 1}};
  const Tallies replicated = {{"all_gather", kGathers}, {"reduce_scatter", kBlocks}, {"all_reduce", kBlocks + 1}};
  expect_trains_like_one_process({.dp = 4, .same_batches = true}, {.near = near, .counts = sharded});
  expect_trains_like_one_process({.replicas = 2, .dp = 2, .same_batches = true}, {.near = near, .counts = replicated});
  expect_trains_like_one_process({.dp = 4, .by_ddp = true, .same_batches = true},
                                 {.near = near, .counts = {{"all_reduce", 1}}});
}

TEST(Combinations, NothingIsLeftOfATrainingThatIsGone) {
  for (const bool by_ddp : {false, true}) {
    run_ranks(4, [&](const Group& group) {
      const size_t owners = group.use_count();
      for (const bool is_captured : {false, true}) {
        Trainer({.dp = 2, .tp = 2, .by_ddp = by_ddp, .by_sequence = true, .recomputes = !by_ddp}, group)
            .train(is_captured);
        EXPECT_EQ(group.use_count(), owners) << by_ddp << is_captured;
      }
    });
  }
}

}  // namespace
}  // namespace serried::testing
