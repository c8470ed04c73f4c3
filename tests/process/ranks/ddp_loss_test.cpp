// DistributedDataParallel when a rank dies in backward.
#include "tests/process/ranks/survivors.h"

namespace serried::testing {
namespace {

TEST(DdpRanks, SurvivorsOfADeathInBackwardTrainOn) {
  const std::string out = expect_survivors_train_on(SERRIED_DDP_WORKER, "eager");
  EXPECT_EQ(count_of(out, "nothing was replayed"), 0) << out;
}

TEST(DdpRanks, SurvivorsOfADeathInAReplayTrainOn) {
  const std::string out = expect_survivors_train_on(SERRIED_DDP_WORKER, "captured");
  EXPECT_EQ(count_of(out, "nothing was replayed"), 0) << out;
}

}  // namespace
}  // namespace serried::testing
