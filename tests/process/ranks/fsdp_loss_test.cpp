// fully_shard when a rank dies while the others gather or reduce.
#include <gtest/gtest.h>

#include <signal.h>

#include <regex>

#include "tests/process/command.h"

namespace serried::testing {
namespace {

void expect_survivors_start_anew(const std::string& pass) {
  const TemporaryFolder folder;
  const Result result =
      serried({"run", "-n", "3", "--grace", "15", SERRIED_FSDP_WORKER, folder.path() + "/note", pass});
  EXPECT_EQ(result.exit_code, 128 + SIGKILL);
  const std::regex raised("raised after (\\d+) ms: .*rank 1 \\(pid \\d+\\) died");
  int survivors = 0;
  for (std::sregex_iterator it(result.out.begin(), result.out.end(), raised), end; it != end; ++it) {
    EXPECT_LE(std::stoi((*it)[1]), 200) << result.out;
    ++survivors;
  }
  EXPECT_EQ(survivors, 2) << result.out << result.err;
  EXPECT_EQ(count_of(result.out, "was left"), 0) << result.out;
  EXPECT_EQ(count_of(result.out, "trained on"), 2) << result.out << result.err;
}

TEST(FullyShardRanks, SurvivorsOfADeathInAGatherStartAnew) {
  expect_survivors_start_anew("forward");
}

TEST(FullyShardRanks, SurvivorsOfADeathInBackwardStartAnew) {
  expect_survivors_start_anew("backward");
}

}  // namespace
}  // namespace serried::testing
