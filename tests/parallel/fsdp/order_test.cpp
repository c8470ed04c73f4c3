// What the next pass will use, foretold by the last one.
#include "serried/parallel/fsdp/order.h"

#include <gtest/gtest.h>

namespace serried::testing {
namespace {

using detail::Order;
using Numbers = std::vector<int64_t>;

void run_pass(Order& order, const Numbers& blocks) {
  for (const int64_t block : blocks) order.note(block);
  order.end_pass();
}

Numbers expected_after(Order& order, const Numbers& blocks) {
  for (const int64_t block : blocks) order.note(block);
  const Numbers expected = order.expected().vec();
  for (const int64_t block : expected) order.note(block);
  order.end_pass();
  return expected;
}

TEST(FullyShardOrder, TheFirstPassIsNotedAndTheNextOnesAreForetold) {
  Order order;
  order.note(7);
  EXPECT_TRUE(order.expected().empty());
  order.end_pass();
  run_pass(order, {7, 2, 5, 2});
  EXPECT_EQ(expected_after(order, {}), Numbers());
  run_pass(order, {7, 2, 5, 2});
  EXPECT_EQ(expected_after(order, {7}), (Numbers{2, 5, 2}));
  EXPECT_EQ(expected_after(order, {7, 2, 5}), Numbers{2});
}

TEST(FullyShardOrder, AnotherWayIsBelievedOnlyAfterMorePassesThanBefore) {
  Order order;
  run_pass(order, {1, 2, 3});
  EXPECT_EQ(expected_after(order, {1}), (Numbers{2, 3}));
  order.note(1);
  order.note(3);
  EXPECT_TRUE(order.expected().empty());
  order.end_pass();
  order.note(1);
  EXPECT_TRUE(order.expected().empty()) << "once is not enough any more";
  order.note(3);
  order.end_pass();
  EXPECT_EQ(expected_after(order, {1}), Numbers{3});
}

TEST(FullyShardOrder, AShorterPassChangesItAndOneThatFailsDoesNot) {
  Order order;
  run_pass(order, {1, 2, 3});
  order.note(1);
  order.end_pass(/*completed=*/false);
  EXPECT_EQ(expected_after(order, {1}), (Numbers{2, 3}));
  run_pass(order, {1, 2});
  order.note(1);
  EXPECT_TRUE(order.expected().empty());
}

TEST(FullyShardOrder, PassesThatNobodyEndsBeginAnewWithTheirFirstBlock) {
  Order order;
  for (int pass = 0; pass < 2; ++pass) {
    for (const int64_t block : {4, 5, 6}) order.note(block, /*begins_anew=*/true);
  }
  order.note(4, true);
  EXPECT_EQ(order.expected().vec(), (Numbers{5, 6}));
}

TEST(FullyShardOrder, APassWithoutAnEndTakesNoMoreAndMoreMemory) {
  Order order;
  for (int64_t i = 0; i < 100000; ++i) order.note(i % 3);
  order.end_pass();
  EXPECT_LE(expected_after(order, {}).size(), size_t(1 << 14));
}

}  // namespace
}  // namespace serried::testing
