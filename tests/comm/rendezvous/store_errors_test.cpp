// A store that is gone: the error says which call, and whose store.
#include "serried/comm/rendezvous/world_store.h"

#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "serried/comm/groups/group.h"
#include "tests/support/errors.h"

namespace serried {
namespace {

/// As a TCP store whose server has died.
struct BrokenStore : c10d::HashStore {
  int64_t add(const std::string&, int64_t) override {
    throw c10::DistNetworkError("Connection reset by peer\nException raised from recvBytes");
  }
};

TEST(StoreErrors, NewGroupSaysThatTheStoreIsGone) {
  const ThreadRankLabel label({.rank = 1, .world_size = 2});
  const auto store = c10::make_intrusive<BrokenStore>();
  const auto make = [&] { new_group("shm", {.store = store, .rank = 1, .world_size = 2}); };
  EXPECT_EQ(testing::error_text<c10::DistNetworkError>(make),
            "[new_group] the store where the ranks meet is gone: Connection reset by peer\n"
            "  fix: look at why the rank that serves it, rank 0 unless you made the store, has ended; then start the "
            "job again\n"
            "  at:  rank 1/2");
}

TEST(StoreErrors, OnesInOurOwnWordsStayAsTheyAre) {
  const auto fail = [] {
    detail::through_store("new_group", []() -> int { throw c10::DistNetworkError("[rendezvous] nothing listens"); });
  };
  EXPECT_EQ(testing::error_text<c10::DistNetworkError>(fail), "[rendezvous] nothing listens");
}

}  // namespace
}  // namespace serried
