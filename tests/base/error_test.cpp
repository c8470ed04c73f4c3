// The message format and the rank label.
#include "serried/base/error.h"

namespace serried {
namespace {

TEST(Error, SaysWhereWhatFixAndRank) {
  ThreadRankLabel label({.rank = 3, .world_size = 8});
  EXPECT_EQ(format_error({"shard", "10 is not divisible by 4", "pad to 12"}),
            "[shard] 10 is not divisible by 4\n  fix: pad to 12\n  at:  rank 3/8");
}

TEST(Error, LabelIsRestoredOnExit) {
  ThreadRankLabel outer({.rank = 1, .world_size = 2});
  {
    ThreadRankLabel inner({.rank = 0, .world_size = 1});
    EXPECT_EQ(rank_label().rank, 0);
  }
  EXPECT_EQ(rank_label().rank, 1);
}

TEST(Error, KeepsTheTypeOfC10) {
  EXPECT_THROW(raise<c10::ValueError>({"a", "b", "c"}), c10::ValueError);
  EXPECT_THROW(raise<c10::DistBackendError>({"a", "b", "c"}), c10::Error);
}

}  // namespace
}  // namespace serried
