// Nodes whose ranks fail again and again, and are left out for a while.
#include "serried/launch/sit_out.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>

#include "serried/launch/socket.h"
#include "tests/process/command.h"
#include "tests/process/membership_tools.h"

namespace serried::launch {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

TEST(LaunchSitOut, AfterThreeFailuresWithinTheSpanForTheSpan) {
  SitOut sit_out(Seconds(600));
  for (const double time : {0.0, 400.0, 601.0}) sit_out.failed("a", at(time));  // the first is forgotten by then
  EXPECT_FALSE(sit_out.sits_out("a", at(601)));
  EXPECT_EQ(sit_out.next_back(at(601)), kNever);
  sit_out.failed("b", at(602));
  sit_out.failed("a", at(700));
  EXPECT_TRUE(sit_out.sits_out("a", at(700)));
  EXPECT_FALSE(sit_out.sits_out("b", at(700)));
  EXPECT_EQ(sit_out.next_back(at(700)), at(1300));
  EXPECT_FALSE(sit_out.sits_out("a", at(1300)));
  sit_out.failed("a", at(1301));  // it begins anew
  EXPECT_FALSE(sit_out.sits_out("a", at(1301)));
  EXPECT_EQ(sit_out.text("h1"), "h1 sits out for 600 s: its ranks failed 3 times within that time");
}

TEST(LaunchSitOut, ASpanOfZeroIsNever) {
  SitOut sit_out(Seconds(0));
  for (int i = 0; i < 9; ++i) sit_out.failed("a", at(1));
  EXPECT_FALSE(sit_out.sits_out("a", at(1)));
}

MembershipOptions options_with_sit_out(bool keep_going) {
  MembershipOptions options = options_for(2, 3, 9);
  options.sit_out = Seconds(600);
  options.keep_going = keep_going;
  return options;
}

TEST(LaunchSitOut, ANodeIsLeftOutOfTheNextTableAndComesBack) {
  Membership membership(options_with_sit_out(false));
  for (const char* host : {"a", "b", "c"}) membership.join(joiner(host, 2, 3, 1), at(0));
  const auto fail = [&](int node, double time) {
    membership.tick(at(time));
    membership.failed(node, exit_3());
    for (int each = 0; each < 3; ++each) membership.ended(each);
    return membership.take_orders();
  };
  fail(2, 1);
  fail(2, 2);
  const std::vector<MemberOrder> orders = fail(2, 3);
  ASSERT_EQ(orders.size(), 6u);  // three have stopped
  EXPECT_EQ(orders[3].member, 2);
  EXPECT_EQ(orders[3].order.kind, Order::Kind::wait);
  EXPECT_EQ(orders[3].order.assignment.news, "c sits out for 600 s: its ranks failed 3 times within that time");
  EXPECT_EQ(order_from(to_message(orders[3].order)).assignment.news, orders[3].order.assignment.news);
  EXPECT_EQ(orders[4].order.assignment.world_size, 2);
  EXPECT_EQ(orders[4].order.assignment.num_nodes, 2);
  EXPECT_EQ(orders[4].order.assignment.news,
            "restart 3 of 9: all ranks start again on 2 nodes; c sits out for 600 s: its ranks failed 3 times within "
            "that time");
  EXPECT_EQ(membership.deadline(), at(603));
  membership.tick(at(602));
  EXPECT_TRUE(membership.take_orders().empty());
  membership.tick(at(603));
  const std::vector<MemberOrder> stops = membership.take_orders();
  ASSERT_EQ(stops.size(), 2u);
  EXPECT_EQ(stops[0].order.cause.host, "c");
  membership.ended(0);
  membership.ended(1);
  const std::vector<MemberOrder> starts = membership.take_orders();
  ASSERT_EQ(starts.size(), 3u);
  EXPECT_EQ(starts[2].order.assignment.news, "the nodes are others: all ranks start again on 3 nodes");
}

TEST(LaunchSitOut, NobodyIsLeftOutWhereThereWouldBeTooFewAndTheLeaderNever) {
  for (const int culprit : {0, 1}) {
    Membership membership(options_with_sit_out(false));
    membership.join(joiner("a", 2, 3, 1), at(0));
    membership.join(joiner("b", 2, 3, 1), at(0));
    if (culprit == 0) membership.join(joiner("c", 2, 3, 1), at(0));
    membership.tick(at(3));
    for (int i = 0; i < 5; ++i) {
      membership.take_orders();
      membership.failed(culprit, exit_3());
      for (int each = 0; each < (culprit == 0 ? 3 : 2); ++each) membership.ended(each);
    }
    for (const auto& [member, order] : membership.take_orders()) EXPECT_NE(order.kind, Order::Kind::wait);
  }
}

// A launcher that is started anew on the machine does not help.
TEST(LaunchSitOut, AMachineThatComesAgainStillSitsOut) {
  Membership membership(options_with_sit_out(false));
  for (const char* host : {"a", "b", "c"}) membership.join(joiner(host, 2, 3, 1), at(0));
  for (int i = 0; i < 3; ++i) {
    membership.failed(2, exit_3());
    for (int each = 0; each < 3; ++each) membership.ended(each);
  }
  membership.lost(2);
  membership.take_orders();
  membership.join(joiner("c", 2, 3, 1), at(10));
  membership.tick(at(20));
  EXPECT_TRUE(membership.take_orders().empty());
  membership.tick(at(601));
  EXPECT_EQ(membership.take_orders().size(), 2u) << "both are stopped, since the job grows";
}

TEST(LaunchSitOut, RanksThatLiveOnGetNoneInThePlaceOfTheLostMeanwhile) {
  Membership membership(options_with_sit_out(true));
  for (const char* host : {"a", "b", "c"}) membership.join(joiner(host, 2, 3, 1), at(0));
  for (int seat = 0; seat < 3; ++seat) membership.rank_is_elastic(seat, seat);
  membership.tick(at(1));
  membership.rank_lost(2, 2, exit_3());
  membership.rank_lost(2, 3, exit_3());
  membership.take_orders();
  membership.rank_lost(2, 4, exit_3());
  const std::vector<MemberOrder> orders = membership.take_orders();
  ASSERT_EQ(orders.size(), 5u);  // a table for two
  EXPECT_EQ(orders[0].order.cause.note,
            "the other 2 ranks go on; c sits out for 600 s: its ranks failed 3 times within that time");
  EXPECT_EQ(orders[4].order.assignment.world_size, 2);
  membership.tick(at(602));
  const std::vector<MemberOrder> later = membership.take_orders();
  ASSERT_EQ(later.size(), 3u);
  EXPECT_EQ(later[2].order.assignment.news, "the job grows by c: 3 ranks");
  // With one node less it is needed, whatever it did.
  for (const int seat : {5, 6, 7}) membership.rank_lost(2, seat, exit_3());
  membership.take_orders();
  membership.lost(1);
  const std::vector<MemberOrder> last = membership.take_orders();
  ASSERT_FALSE(last.empty());
  EXPECT_EQ(last.back().member, 2);
  EXPECT_EQ(last.back().order.assignment.world_size, 2);
}

TEST(LaunchSitOut, TheLauncherSaysSo) {
  const int port = testing::free_port();
  const testing::TemporaryFolder folder;
  const std::string script =
      "echo $TORCHELASTIC_RESTART_COUNT of $GROUP_WORLD_SIZE\n"
      "if [ $GROUP_WORLD_SIZE = 2 ] && [ $GROUP_RANK = 1 ]; then exit 3; fi\n"
      "until [ -e " +
      folder.path() + "/go ]; do sleep 0.01; done";
  const auto start = [&](const std::string& node_rank) {
    return std::make_unique<testing::Command>(
        testing::shell({"--nnodes", "1:2", "--rendezvous", "127.0.0.1:" + std::to_string(port), "--max-restarts", "9",
                        "--sit-out", "500", "--node-rank", node_rank},
                       script));
  };
  const auto first = start("0");
  const auto second = start("1");
  const std::string said = host_name() + " sits out for 500 s: its ranks failed 3 times within that time\n";
  second->wait_for("[run] " + said);
  first->wait_for("[run] restart 3 of 9: all ranks start again on 1 node; " + said);
  first->wait_for("3 of 1\n");
  testing::write_file(folder.path() + "/go", "");
  EXPECT_EQ(first->finish().exit_code, 0);
  const testing::Result result = second->finish();
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.out, Not(HasSubstr("3 of ")));
}

TEST(LaunchSitOut, ATimeThatIsNoneIsRefused) {
  const testing::Result result = testing::serried({"run", "--sit-out", "-1", "true"});
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_EQ(result.err,
            "[run] --sit-out is -1 s\n  fix: pass a number of seconds, or 0 for nodes that never sit out\n");
}

}  // namespace
}  // namespace serried::launch
