// DistributedDataParallel when a rank dies in backward.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <signal.h>

#include <regex>

#include "tests/process/command.h"

namespace serried::testing {
namespace {

void expect_survivors_train_on(const std::string& how) {
  const TemporaryFolder folder;
  const Result result = serried({"run", "-n", "3", "--grace", "15", SERRIED_DDP_WORKER, folder.path() + "/note", how});
  EXPECT_EQ(result.exit_code, 128 + SIGKILL);
  const std::regex raised("raised after (\\d+) ms: .*rank 1 \\(pid \\d+\\) died");
  int survivors = 0;
  for (std::sregex_iterator it(result.out.begin(), result.out.end(), raised), end; it != end; ++it) {
    EXPECT_LE(std::stoi((*it)[1]), 200) << result.out;
    ++survivors;
  }
  EXPECT_EQ(survivors, 2) << result.out << result.err;
  EXPECT_EQ(count_of(result.out, "was left"), 0) << result.out;
  EXPECT_EQ(count_of(result.out, "nothing was replayed"), 0) << result.out;
  EXPECT_EQ(count_of(result.out, "trained on"), 2) << result.out << result.err;
}

TEST(DdpRanks, SurvivorsOfADeathInBackwardTrainOn) {
  expect_survivors_train_on("eager");
}

TEST(DdpRanks, SurvivorsOfADeathInAReplayTrainOn) {
  expect_survivors_train_on("captured");
}

}  // namespace
}  // namespace serried::testing
