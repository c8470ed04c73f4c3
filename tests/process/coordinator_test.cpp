// The decisions over nodes, without processes or sockets.
#include "serried/launch/coordinator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace serried::launch {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

// Orders as short texts: "1:start@2/5" is node 1, first rank 2 of 5.
std::vector<std::string> orders(Coordinator& coordinator) {
  std::vector<std::string> result;
  for (const auto& [node, order] : coordinator.take_orders()) {
    std::string text = std::to_string(node) + ":";
    if (order.kind == Order::Kind::start) {
      text +=
          "start@" + std::to_string(order.assignment.first_rank) + "/" + std::to_string(order.assignment.world_size);
    }
    if (order.kind == Order::Kind::stop) text += "stop";
    if (order.kind == Order::Kind::exit) text += "exit" + std::to_string(order.exit_code);
    result.push_back(text);
  }
  return result;
}

Coordinator two_nodes(int max_restarts = 0) {
  Coordinator coordinator(
      {.num_nodes = 2, .max_restarts = max_restarts, .run_id = "id", .new_master_port = [] { return 1; }});
  EXPECT_EQ(coordinator.join(0, 2, 2, "a"), "");
  EXPECT_EQ(coordinator.join(1, 2, 3, "b"), "");
  EXPECT_THAT(orders(coordinator), ElementsAre("0:start@0/5", "1:start@2/5"));
  return coordinator;
}

Cause exit_3() {
  return {.rank = 4, .exit_code = 3};
}

TEST(LaunchCoordinator, EndsWithZeroWhenAllNodesAreDone) {
  Coordinator coordinator = two_nodes();
  coordinator.done(1);
  EXPECT_THAT(orders(coordinator), IsEmpty());
  coordinator.done(0);
  EXPECT_THAT(orders(coordinator), ElementsAre("0:exit0", "1:exit0"));
}

TEST(LaunchCoordinator, OneFailureStopsAllAndItsCodeIsTheJobs) {
  Coordinator coordinator = two_nodes();
  coordinator.failed(1, exit_3());
  EXPECT_THAT(orders(coordinator), ElementsAre("0:stop", "1:stop"));
  coordinator.failed(0, {.rank = 0, .exit_code = 9});  // came second
  coordinator.ended(0);
  EXPECT_THAT(orders(coordinator), IsEmpty());
  coordinator.ended(1);
  EXPECT_THAT(orders(coordinator), ElementsAre("0:exit3", "1:exit3"));
}

TEST(LaunchCoordinator, RestartsAllTogetherAsOftenAsAllowed) {
  Coordinator coordinator = two_nodes(1);
  for (int attempt = 0; attempt < 2; ++attempt) {
    coordinator.done(0);
    coordinator.failed(1, exit_3());
    orders(coordinator);
    coordinator.ended(0);
    coordinator.ended(1);
    if (attempt == 0) {
      EXPECT_THAT(orders(coordinator), ElementsAre("0:start@0/5", "1:start@2/5"));
    }
  }
  EXPECT_THAT(orders(coordinator), ElementsAre("0:exit3", "1:exit3"));
}

TEST(LaunchCoordinator, AnInterruptedJobDoesNotRestart) {
  Coordinator coordinator = two_nodes(5);
  coordinator.failed(1, exit_3());
  coordinator.failed(0, {.kind = Cause::Kind::interrupted, .signal = 2});
  orders(coordinator);
  coordinator.ended(0);
  coordinator.ended(1);
  EXPECT_THAT(orders(coordinator), ElementsAre("0:exit130", "1:exit130"));
}

TEST(LaunchCoordinator, ALostNodeEndsTheOthersWithoutRestart) {
  Coordinator coordinator = two_nodes(5);
  coordinator.lost(1);
  EXPECT_THAT(orders(coordinator), ElementsAre("0:stop"));
  coordinator.ended(0);
  EXPECT_THAT(orders(coordinator), ElementsAre("0:exit1"));
}

TEST(LaunchCoordinator, RefusesWhatDoesNotFit) {
  Coordinator coordinator({.num_nodes = 3, .run_id = "id", .new_master_port = [] { return 1; }});
  EXPECT_EQ(coordinator.join(0, 3, 1, "a"), "");
  EXPECT_EQ(coordinator.join(1, 3, 1, "b"), "");
  EXPECT_EQ(coordinator.join(1, 3, 1, "c"), "--node-rank 1 is taken by b");
  EXPECT_EQ(coordinator.join(2, 4, 1, "c"), "this node was started with --nnodes 4, node 0 with --nnodes 3");
  EXPECT_EQ(coordinator.join(2, 3, 0, "c"), "it brings 0 ranks");
  EXPECT_EQ(coordinator.join(2, 3, 2147483647, "c"), "it brings 2147483647 ranks");
  EXPECT_EQ(coordinator.join(7, 3, 1, "c"), "there is no node-rank 7");
  EXPECT_THAT(coordinator.missing(), ElementsAre(2));
  coordinator.lost(1);  // before the start it may come again
  EXPECT_THAT(coordinator.missing(), ElementsAre(1, 2));
}

}  // namespace
}  // namespace serried::launch
