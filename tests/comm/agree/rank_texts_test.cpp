// Texts that ranks share through a store.
#include "serried/comm/agree/rank_texts.h"

#include <gtest/gtest.h>

#include <chrono>

#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "serried/comm/groups/ranks.h"
#include "tests/support/errors.h"

namespace serried::detail {
namespace {

using namespace std::chrono_literals;
using serried::testing::error_text;

TEST(RankTexts, OneRankTellsAndAnotherListens) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  tell({store, 1, 3, 1s}, "key", "mine");
  EXPECT_EQ(listen_to({store, 0, 3, 1s}, "new_group", "key", 1), "mine");
}

TEST(RankTexts, ARankThatTellsNothingIsNamed) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  EXPECT_EQ(error_text<c10::DistBackendError>([&] {
              listen_to({store, 0, 3, 50ms}, "new_group", "key", 2);
            }),
            "[new_group] rank 2 of 3 did not come within 50 ms\n"
            "  fix: look at what those ranks are doing; every rank must make the same groups in the same order");
}

TEST(RankLog, IsReadByOthersInTheOrderOfItsTexts) {
  run_ranks(3, [](const Group& group) {
    RankLog log(group, "log");
    log.add(c10::str("first of ", group->getRank()));
    log.add("second");
    const auto deadline = std::chrono::steady_clock::now() + 10s;
    for (int rank = 0; rank < 3; ++rank) {
      EXPECT_EQ(log.read(rank, 0, deadline), c10::str("first of ", rank));
      EXPECT_EQ(log.read(rank, 1, deadline), "second");
    }
  });
}

TEST(RankLog, HasNothingToReadOnceTheTimeIsOver) {
  run_ranks(2, [](const Group& group) {
    const RankLog log(group, "log");
    EXPECT_EQ(log.read(1 - group->getRank(), 0, std::chrono::steady_clock::now()), std::nullopt);
  });
}

}  // namespace
}  // namespace serried::detail
