// Ranks that are processes are killed where they say, and the others go on under serried run --keep-going.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/process/command.h"

namespace serried::testing {
namespace {

using ::testing::HasSubstr;

Result trained(std::vector<std::string> options, std::vector<std::string> arguments) {
  std::vector<std::string> words = {"run", "--keep-going"};
  words.insert(words.end(), options.begin(), options.end());
  words.push_back(SERRIED_ELASTIC_WORKER);
  words.insert(words.end(), arguments.begin(), arguments.end());
  Result result = serried(words);
  EXPECT_EQ(result.exit_code, 0) << result.out << result.err;
  EXPECT_EQ(count_of(result.out, "DIFFERS"), 0) << result.out;
  return result;
}

TEST(ElasticRanks, WithoutADeathAllTrain) {
  const Result result = trained({"-n", "3"}, {"5", "3"});
  EXPECT_EQ(count_of(result.out, "equals the plain loop after 3 3 3 3 3 ;"), 3) << result.out << result.err;
}

TEST(ElasticRanks, ThoseLeftGoOnWithTheStep) {
  for (const char* death : {"2:1:forward:0", "2:0:bucket:0", "2:2:bucket:2", "2:1:commit:0"}) {
    const Result result = trained({"-n", "3"}, {"5", "1", death});
    EXPECT_EQ(count_of(result.out, "equals the plain loop after 3 3 2 2 2 ;"), 2) << death << result.out << result.err;
  }
}

TEST(ElasticRanks, BehindCommitTheStepCounts) {
  for (const char* death : {"2:1:before_optimizer:0", "2:0:behind_optimizer:0"}) {
    const Result result = trained({"-n", "3"}, {"5", "1", death});
    EXPECT_EQ(count_of(result.out, "equals the plain loop after 3 3 3 2 2 ;"), 2) << death << result.out << result.err;
  }
}

TEST(ElasticRanks, ALostRankIsStartedAgainAndTakesTheState) {
  const Result result = trained({"-n", "3", "--max-restarts", "1"}, {"6", "3", "3:1:bucket:1"});
  EXPECT_EQ(count_of(result.out, "equals the plain loop after 3 3 3 3 3 3 ;"), 3) << result.out << result.err;
}

TEST(ElasticRanks, TheSourceOfAStateDies) {
  const Result result = trained({"-n", "4", "--max-restarts", "2"}, {"6", "3", "2:3:bucket:1", "2:0:transfer:0"});
  EXPECT_GE(count_of(result.out, "equals the plain loop after"), 3) << result.out << result.err;
}

TEST(ElasticRanks, TwoDieInOneStep) {
  const Result result = trained({"-n", "4"}, {"5", "1", "2:1:forward:0", "2:3:bucket:2"});
  EXPECT_EQ(count_of(result.out, "equals the plain loop after 4 4 2 2 2 ;"), 2) << result.out << result.err;
}

TEST(ElasticRanks, WithoutKeepGoingALossEndsTheJob) {
  const Result result = serried({"run", "-n", "2", SERRIED_ELASTIC_WORKER, "5", "1", "2:1:forward:0"});
  EXPECT_EQ(result.exit_code, 137) << result.err;
  EXPECT_THAT(result.err, HasSubstr("killed by signal 9"));
}

}  // namespace
}  // namespace serried::testing
