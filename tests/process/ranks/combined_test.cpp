// Strategies in combination, with ranks as processes over shared memory.
#include <gtest/gtest.h>

#include "tests/process/command.h"

namespace serried::testing {
namespace {

class CombinedRanks : public ::testing::TestWithParam<const char*> {};

TEST_P(CombinedRanks, TrainLikeOneProcessAndCapturedLikeEager) {
  const Result result = serried({"run", "-n", "4", SERRIED_COMBINED_WORKER, GetParam()});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(count_of(result.out, "trained alike"), 4) << result.out << result.err;
}

INSTANTIATE_TEST_SUITE_P(As, CombinedRanks, ::testing::Values("fsdp", "hsdp", "fsdp_tp", "ddp_tp"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace serried::testing
