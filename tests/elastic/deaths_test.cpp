// Ranks die at every point of a step and of a meeting, and the training goes on as a plain loop would.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "tests/support/elastic_training.h"

namespace serried::testing {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::Le;

TEST(ElasticDeaths, NobodyDies) {
  for (int num_ranks = 1; num_ranks <= 4; ++num_ranks) {
    Training training({.num_ranks = num_ranks});
    training.run();
    EXPECT_EQ(training.num_survivors(), num_ranks);
    EXPECT_THAT(training.members(), Each(num_ranks));
  }
}

TEST(ElasticDeaths, InForwardTheStepIsDoneAgainByThoseLeft) {
  for (int num_ranks = 2; num_ranks <= 4; ++num_ranks) {
    Training training({.num_ranks = num_ranks, .num_steps = 4, .faults = {{.step = 1, .phase = Phase::forward}}});
    training.run();
    EXPECT_EQ(training.num_survivors(), num_ranks - 1);
    EXPECT_THAT(training.members(), ElementsAre(num_ranks, num_ranks - 1, num_ranks - 1, num_ranks - 1));
  }
}

TEST(ElasticDeaths, InEachBucket) {
  for (int bucket = 0; bucket < 4; ++bucket) {
    for (int id = 0; id < 3; ++id) {
      Training training(
          {.num_ranks = 3, .num_steps = 4, .faults = {{.step = 2, .phase = Phase::bucket, .nth = bucket, .id = id}}});
      training.run();
      EXPECT_EQ(training.num_kills(), 1);
      EXPECT_THAT(training.members(), ElementsAre(3, 3, 2, 2)) << "bucket " << bucket << " of rank " << id;
    }
  }
}

TEST(ElasticDeaths, InCommitNobodyHasStepped) {
  Training training({.num_ranks = 3, .num_steps = 4, .faults = {{.step = 1, .phase = Phase::commit}}});
  training.run();
  EXPECT_THAT(training.members(), ElementsAre(3, 2, 2, 2));
}

TEST(ElasticDeaths, BehindCommitTheStepCounts) {
  for (const Phase phase : {Phase::before_optimizer, Phase::behind_optimizer}) {
    Training training({.num_ranks = 3, .num_steps = 4, .adam = true, .faults = {{.step = 1, .phase = phase}}});
    training.run();
    EXPECT_EQ(training.num_kills(), 1) << to_string(phase);
    EXPECT_THAT(training.members(), ElementsAre(3, 3, 2, 2)) << to_string(phase);
  }
}

TEST(ElasticDeaths, InTheFirstMeeting) {
  for (const Phase phase : {Phase::meeting_begins, Phase::meeting, Phase::transfer, Phase::on_change}) {
    Training training({.num_ranks = 3, .num_steps = 3, .faults = {{.phase = phase}}});
    training.run();
    EXPECT_EQ(training.num_kills(), 1) << to_string(phase);
    EXPECT_THAT(training.members(), ElementsAre(2, 2, 2)) << to_string(phase);
  }
}

TEST(ElasticDeaths, AtEachCollectiveOfTheMeetingAfterALoss) {
  for (int nth = 0; nth < 3; ++nth) {
    Training training(
        {.num_ranks = 4,
         .num_steps = 4,
         .faults = {{.step = 1, .phase = Phase::bucket, .nth = 1}, {.step = 1, .phase = Phase::meeting, .nth = nth}}});
    training.run();
    EXPECT_EQ(training.num_kills(), 2) << nth;
    EXPECT_THAT(training.members(), ElementsAre(4, 2, 2, 2)) << nth;
  }
}

TEST(ElasticDeaths, TwoInOneStep) {
  Training training(
      {.num_ranks = 4,
       .num_steps = 4,
       .faults = {{.step = 1, .phase = Phase::forward, .id = 0}, {.step = 1, .phase = Phase::forward, .id = 3}}});
  training.run();
  EXPECT_EQ(training.num_kills(), 2);
  EXPECT_THAT(training.members(), ElementsAre(4, 2, 2, 2));
}

TEST(ElasticDeaths, ARankThatComesTakesTheStateOfTheOthers) {
  for (const bool first : {false, true}) {
    for (const bool adam : {false, true}) {
      Training training({.num_ranks = 2, .num_steps = 5, .adam = adam, .joins = {1}, .joins_come_first = first});
      training.run();
      EXPECT_EQ(training.num_survivors(), 3);
      EXPECT_THAT(training.members(), ElementsAre(2, 2, 3, 3, 3));
    }
  }
}

TEST(ElasticDeaths, ARankComesInPlaceOfALostOne) {
  Training training({.num_ranks = 2,
                     .num_steps = 6,
                     .min_ranks = 2,
                     .adam = true,
                     .faults = {{.step = 2, .phase = Phase::bucket, .nth = 2}},
                     .joins_at_loss = {0}});
  training.run();
  EXPECT_EQ(training.num_survivors(), 2);
  EXPECT_THAT(training.members(), Each(2));
}

TEST(ElasticDeaths, InTheTransferToANewcomer) {
  for (int nth = 0; nth < 3; ++nth) {
    Training training({.num_ranks = 3,
                       .num_steps = 6,
                       .adam = true,
                       .faults = {{.step = 2, .phase = Phase::transfer, .nth = nth}},
                       .joins = {1, 2}});
    training.run();
    EXPECT_EQ(training.num_survivors(), 5 - training.num_kills()) << nth;
  }
}

// A schedule from a seed: which, when and where.
TrainingOptions random_options(std::mt19937& random) {
  const auto below = [&](int end) { return int(random() % unsigned(end)); };
  TrainingOptions options{
      .num_ranks = 2 + below(3), .num_steps = 5 + below(4), .adam = below(2) == 0, .joins_come_first = below(3) == 0};
  const int num_faults = 1 + below(5);
  for (int i = 0; i < num_faults; ++i) {
    options.faults.push_back(
        {.step = below(int(options.num_steps) - 1), .phase = Phase(below(kNumPhases)), .nth = below(4)});
    if (below(2) == 0) options.joins_at_loss.insert(i);
  }
  if (below(2) == 0) options.joins.insert(below(int(options.num_steps) - 3));
  return options;
}

TEST(ElasticDeaths, TwoHundredAtRandom) {
  const uint32_t seed = std::random_device()();
  std::mt19937 random(seed);
  int num_kills = 0, num_runs = 0;
  while (num_kills < 200 && !HasFailure()) {
    SCOPED_TRACE("run " + std::to_string(num_runs++) + " of seed " + std::to_string(seed));
    Training training(random_options(random));
    training.run();
    num_kills += training.num_kills();
    ASSERT_THAT(num_runs, Le(1000));
  }
  EXPECT_THAT(num_kills, ::testing::Ge(200)) << "seed " << seed;
}

}  // namespace
}  // namespace serried::testing
