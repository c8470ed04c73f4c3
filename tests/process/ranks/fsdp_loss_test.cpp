// fully_shard when a rank dies while the others gather or reduce.
#include "tests/process/ranks/survivors.h"

namespace serried::testing {
namespace {

TEST(FullyShardRanks, SurvivorsOfADeathInAGatherStartAnew) {
  expect_survivors_train_on(SERRIED_FSDP_WORKER, "forward");
}

TEST(FullyShardRanks, SurvivorsOfADeathInBackwardStartAnew) {
  expect_survivors_train_on(SERRIED_FSDP_WORKER, "backward");
}

}  // namespace
}  // namespace serried::testing
