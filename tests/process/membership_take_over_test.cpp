// A leader that is started while the ranks of its job live: what it makes of what their launchers say.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <utility>

#include "serried/launch/membership.h"
#include "tests/process/membership_tools.h"

namespace serried::launch {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// A node's part of a table of 5 ranks on two nodes and a leader without ranks.
Claim claim_of(int node_rank, const std::vector<int>& ranks, int generation = 7) {
  Claim claim{.run_id = "run of before",
              .job_secret = "secret of before",
              .generation = generation,
              .world_size = 5,
              .num_nodes = 2,
              .node_rank = node_rank,
              .leader_was_apart = true,
              .next_seat = 20,
              .master_port = 77};
  // Seats have no order that ranks would know of.
  for (const int rank : ranks) claim.seats.push_back({.number = 10 + (rank + 3) % 5, .rank = rank, .elastic = true});
  return claim;
}
int seat_of(int rank) {
  return 10 + (rank + 3) % 5;
}

MembershipOptions new_leader(int min_nodes = 1, int max_nodes = 3, int max_restarts = 0) {
  MembershipOptions options = keeping(min_nodes, max_nodes, max_restarts);
  options.leader_is_apart = true;
  options.run_id = "own run";
  options.claims_within = Seconds(16);
  return options;
}

Joiner of(const std::string& host, int num_local, int min_nodes = 1, int max_nodes = 3) {
  return joiner(host, min_nodes, max_nodes, num_local);
}

/// The orders for nodes; what a leader without ranks hears is the same.
std::vector<std::string> told(Membership& membership) {
  std::vector<std::string> result = tables(membership);
  std::erase_if(result, [](const std::string& text) { return text.starts_with("-1:"); });
  return result;
}

// Both nodes of it.
Membership led_again(int max_restarts = 0, int restarts_used = 0) {
  Membership membership(new_leader(1, 3, max_restarts));
  Claim first = claim_of(0, {0, 2, 4}), second = claim_of(1, {1, 3});
  first.restarts = second.restarts = restarts_used;
  EXPECT_EQ(membership.rejoin(of("a", 3), first, at(0)).member, 0);
  EXPECT_TRUE(membership.taking_over());
  EXPECT_THAT(told(membership), IsEmpty());
  EXPECT_EQ(membership.rejoin(of("b", 2), second, at(1)).member, 1);
  EXPECT_FALSE(membership.taking_over());
  return membership;
}

TEST(LaunchTakeOver, WhenAllHaveComeTheyGetTheNextTableAndNobodyIsToldOfAnEnd) {
  Membership membership = led_again();
  const std::vector<MemberOrder> orders = membership.take_orders();
  ASSERT_EQ(orders.size(), 3u);
  const Assignment& a = orders[0].order.assignment;
  EXPECT_EQ(orders[0].order.kind, Order::Kind::table);
  EXPECT_EQ(a.attempt, 8);
  EXPECT_EQ(a.world_size, 5);
  EXPECT_EQ(a.run_id, "run of before");
  EXPECT_EQ(a.job_secret, "secret of before");
  EXPECT_EQ(a.next_seat, 20);
  EXPECT_EQ(a.master_port, 77);
  EXPECT_EQ(a.news, "a leader is at its place again: 5 ranks");
  EXPECT_THAT(a.seats, ElementsAre(Seat{seat_of(0), 0, false}, Seat{seat_of(2), 2, false}, Seat{seat_of(4), 4, false}));
  EXPECT_THAT(orders[1].order.assignment.seats, ElementsAre(Seat{seat_of(1), 1, false}, Seat{seat_of(3), 3, false}));
  EXPECT_EQ(orders[2].member, kLeader);
}

TEST(LaunchTakeOver, ThenRanksAreLostAndReplacedAsEver) {
  Membership membership = led_again(1);
  told(membership);
  membership.rank_lost(0, seat_of(2), exit_3());
  EXPECT_THAT(told(membership), ElementsAre("0:over8", "1:over8", "0:table9@0,3,4*/5", "1:table9@1,2/5"));
  // Its number is one that no process has had, and no restart is left.
  membership.rank_lost(0, 20, exit_3());
  EXPECT_THAT(told(membership), ElementsAre("0:over9", "1:over9", "0:table10@0,3/4", "1:table10@1,2/4"));
  membership.lost(1);
  EXPECT_THAT(told(membership), ElementsAre("0:over10", "0:table11@0,1/2"));
  EXPECT_EQ(membership.join(of("c", 1), at(30)).member, 2);
  membership.tick(at(33));
  EXPECT_THAT(told(membership), ElementsAre("0:table12@0,1/3", "2:table12@2*/3"));
}

TEST(LaunchTakeOver, RestartsThatWereUsedUpStaySo) {
  Membership membership = led_again(1, 1);
  told(membership);
  membership.rank_lost(0, seat_of(2), exit_3());
  EXPECT_THAT(told(membership), ElementsAre("0:over8", "1:over8", "0:table9@0,3/4", "1:table9@1,2/4"));
}

TEST(LaunchTakeOver, WhoWasLostMeanwhileIsToldWhenAllHaveCome) {
  Membership membership(new_leader(1, 3, 1));
  Claim first = claim_of(0, {0, 2, 4});
  first.seats[1].lives = false;
  membership.rejoin(of("a", 3), first, at(0));
  membership.rank_lost(0, seat_of(2), exit_3());
  EXPECT_THAT(told(membership), IsEmpty());
  membership.rejoin(of("b", 2), claim_of(1, {1, 3}), at(1));
  EXPECT_THAT(told(membership), ElementsAre("0:over7", "1:over7", "0:table8@0,3,4*/5", "1:table8@1,2/5"));
}

TEST(LaunchTakeOver, TheEndsOfRanksAreAwaitedBehindTheLastClaim) {
  Membership membership(new_leader());
  membership.rejoin(of("a", 3), claim_of(0, {0, 2, 4}), at(0));
  Claim second = claim_of(1, {1, 3});
  second.seats[0].lives = false;
  membership.rejoin(of("b", 2), second, at(1));
  membership.tick(at(1));
  EXPECT_THAT(told(membership), IsEmpty());
  membership.rank_lost(1, seat_of(1), exit_3());
  membership.tick(at(1));
  EXPECT_THAT(told(membership), ElementsAre("0:over7", "1:over7", "0:table8@0,1,3/4", "1:table8@2/4"));
}

TEST(LaunchTakeOver, WhoEndedWellMeanwhileCounts) {
  Membership membership(new_leader());
  membership.rejoin(of("a", 3), claim_of(0, {0, 2, 4}), at(0));
  for (const int rank : {0, 2, 4}) membership.rank_done(0, seat_of(rank));
  membership.rejoin(of("b", 2), claim_of(1, {1, 3}), at(1));
  EXPECT_THAT(told(membership), ElementsAre("1:table8@0,1/2"));
  membership.rank_done(1, seat_of(1));
  membership.rank_done(1, seat_of(3));
  EXPECT_THAT(told(membership), ElementsAre("0:exit0", "1:exit0"));
}

TEST(LaunchTakeOver, WhoDoesNotComeInTimeIsLost) {
  Membership membership(new_leader());
  membership.rejoin(of("b", 2), claim_of(1, {1, 3}), at(0));
  EXPECT_EQ(membership.deadline(), at(16));
  membership.tick(at(15.9));
  EXPECT_THAT(told(membership), IsEmpty());
  membership.tick(at(16));
  const std::vector<MemberOrder> orders = membership.take_orders();
  ASSERT_EQ(orders.size(), 4u);
  EXPECT_EQ(describe(orders[0].order.cause, 5, 3),
            "[run] lost the launcher of node 0: it did not come back to the leader; the other 2 ranks go on\n");
  EXPECT_EQ(orders[2].order.kind, Order::Kind::table);
  EXPECT_EQ(orders[2].order.assignment.world_size, 2);
  // Too late: the others are not where it was.
  const Membership::Joined late = membership.rejoin(of("a", 3), claim_of(0, {0, 2, 4}), at(17));
  EXPECT_EQ(late.refusal,
            "the ranks of this node are of generation 7, and the job has gone on without this node to generation 8");
  EXPECT_TRUE(late.is_final);
}

TEST(LaunchTakeOver, FewerThanTheLeastNumberOfNodesWaitForOthers) {
  Membership membership(new_leader(2, 3));
  membership.rejoin(of("b", 2, 2), claim_of(1, {1, 3}), at(0));
  membership.tick(at(16));
  EXPECT_THAT(told(membership), ElementsAre("0:over7"));
  EXPECT_EQ(membership.deadline(), at(76));
  membership.join(of("c", 1, 2), at(20));
  membership.tick(at(23));
  EXPECT_THAT(told(membership), ElementsAre("1:table8@2*/3", "0:table8@0,1/3"));
}

TEST(LaunchTakeOver, AnOlderGenerationIsRefusedWhicheverComesFirst) {
  const Claim old = claim_of(1, {1, 3}, 6);
  for (const bool first : {false, true}) {
    Membership membership(new_leader());
    const auto join_old = [&] { return membership.rejoin(of("b", 2), old, at(0)).member; };
    int number = first ? join_old() : -1;
    membership.rejoin(of("a", 3), claim_of(0, {0, 2, 4}), at(0));
    if (!first) number = join_old();
    membership.tick(at(16));
    const auto refused = membership.take_refused();
    ASSERT_EQ(refused.size(), 1u);
    EXPECT_EQ(refused[0].member, number);
    EXPECT_EQ(refused[0].host, "b");
    EXPECT_EQ(refused[0].why, "the ranks of this node are of generation 6, and others of the job of generation 7");
    EXPECT_THAT(told(membership),
                ElementsAre(std::to_string(1 - number) + ":over7", std::to_string(1 - number) + ":table8@0,1,2/3"));
  }
}

TEST(LaunchTakeOver, ANodeWithoutRanksStaysWheneverItComes) {
  Claim empty = claim_of(1, {1}, 3);
  empty.seats[0].lives = false;
  for (const bool late : {false, true}) {
    Membership membership(new_leader());
    if (!late) membership.rejoin(of("c", 1), empty, at(0));
    membership.rejoin(of("a", 3), claim_of(0, {0, 2, 4}), at(0));
    membership.rejoin(of("b", 2), claim_of(1, {1, 3}), at(0));
    if (late) {
      EXPECT_EQ(membership.rejoin(of("c", 1), empty, at(5)).member, 2);
    }
    EXPECT_THAT(membership.take_refused(), IsEmpty());
    told(membership);
    for (const int rank : {0, 2, 4}) membership.rank_done(late ? 0 : 1, seat_of(rank));
    for (const int rank : {1, 3}) membership.rank_done(late ? 1 : 2, seat_of(rank));
    EXPECT_THAT(told(membership), ElementsAre("0:exit0", "1:exit0", "2:exit0"));
  }
}

TEST(LaunchTakeOver, WhatDoesNotFitIsRefusedByName) {
  Membership membership(new_leader());
  Joiner other = of("a", 3);
  other.command = {.text = "train --lr 1", .digest = "1"};
  const Claim claim = claim_of(0, {0, 2, 4});
  membership.rejoin(other, claim, at(0));
  Joiner wrong = of("b", 2);
  wrong.command = {.text = "train --lr 2", .digest = "2"};
  const auto command = membership.rejoin(wrong, claim_of(1, {1, 3}), at(0));
  EXPECT_EQ(command.refusal, "this node was started to run \"train --lr 2\", the first one \"train --lr 1\"");
  EXPECT_TRUE(command.is_of_another_job);
  Claim other_run = claim_of(1, {1, 3});
  other_run.run_id = "another";
  other.host = "b";
  const auto run = membership.rejoin(other, other_run, at(0));
  EXPECT_EQ(run.refusal,
            "the ranks of this node are of another run of this job, another, and run run of before is led here");
  EXPECT_TRUE(run.is_final);
  EXPECT_THAT(membership.rejoin(joiner("b", 2, 2, 2), claim, at(0)).refusal,
              HasSubstr("this node was started with --nnodes 2, the leader with --nnodes 1:3"));

  MembershipOptions options = new_leader();
  options.keep_going = false;
  EXPECT_EQ(Membership(options).rejoin(of("a", 3), claim, at(0)).refusal,
            "the ranks of this node live on under --keep-going, and this leader was started without");
  options = new_leader();
  options.leader_is_apart = false;
  EXPECT_EQ(Membership(options).rejoin(of("a", 3), claim, at(0)).refusal,
            "the ranks of this node were led by serried rendezvous, and this leader is a serried run");
  Claim led_by_run = claim;
  led_by_run.leader_was_apart = false;
  const auto kind = Membership(new_leader()).rejoin(of("a", 3), led_by_run, at(0));
  EXPECT_EQ(kind.refusal, "the ranks of this node were led by a serried run, and this leader is a serried rendezvous");
  EXPECT_FALSE(kind.is_final);
}

TEST(LaunchTakeOver, ALeaderThatHasBegunAnewRefusesWhoComesLate) {
  Membership membership(new_leader(1, 1));
  membership.join(of("c", 1, 1, 1), at(0));
  EXPECT_THAT(told(membership), ElementsAre("0:start0@0*/1"));
  const auto late = membership.rejoin(of("a", 3, 1, 1), claim_of(0, {0, 2, 4}), at(1));
  EXPECT_EQ(late.refusal,
            "the ranks of this node are of another run of this job, run of before, and run own run is led here");
  EXPECT_TRUE(late.is_final);
}

// Its own ranks went with the one before; new ones follow those that live.
TEST(LaunchTakeOver, ALeaderWithRanksBringsNewOnes) {
  for (const bool first_is_elastic : {true, false}) {
    MembershipOptions options = new_leader(2, 2, 1);
    options.leader_is_apart = false;
    Membership membership(options);
    membership.join(of("a", 3, 2, 2), at(0));
    Claim claim = claim_of(1, {1, 3});
    claim.leader_was_apart = false;
    claim.num_with_leader = 3;
    claim.seats[0].elastic = first_is_elastic;
    EXPECT_EQ(membership.rejoin(of("b", 2, 2, 2), claim, at(0)).member, 1);
    if (first_is_elastic) {
      EXPECT_THAT(tables(membership),
                  ElementsAre("1:over7", "1:table8@0,1/2", "0:table9@2*,3*,4*/5", "1:table9@0,1/5"));
      continue;
    }
    const std::vector<MemberOrder> stops = membership.take_orders();
    ASSERT_EQ(stops.size(), 1u);
    EXPECT_THAT(describe(stops[0].order.cause, 5, 2), HasSubstr("rank 1 has not made a serried::Elastic by now"));
    membership.ended(1);
    EXPECT_THAT(tables(membership), ElementsAre("0:start8@0*,1*,2*/5", "1:start8@3*,4*/5"));
  }
}

TEST(LaunchTakeOver, NewcomersWaitUntilItIsDone) {
  Membership membership(new_leader());
  membership.join(of("c", 1), at(0));
  membership.rejoin(of("a", 3), claim_of(0, {0, 2, 4}), at(1));
  membership.join(of("d", 1), at(2));  // as many as there may be
  membership.tick(at(6));
  EXPECT_THAT(told(membership), IsEmpty());
  membership.rejoin(of("b", 2), claim_of(1, {1, 3}), at(7));
  // One too many: who was there before stays, and the first who came.
  const auto refused = membership.take_refused();
  ASSERT_EQ(refused.size(), 1u);
  EXPECT_EQ(refused[0].host, "d");
  EXPECT_EQ(refused[0].why, "the job has all of its 3 nodes: they came back");
  EXPECT_THAT(told(membership),
              ElementsAre("1:table8@0,2,4/5", "3:table8@1,3/5", "0:table9@5*/6", "1:table9@0,2,4/6", "3:table9@1,3/6"));
}

TEST(LaunchTakeOver, TheTableWaitsUntilAllRanksUseElastic) {
  Membership membership(new_leader());
  Claim first = claim_of(0, {0, 2, 4});
  first.seats[2].elastic = false;
  membership.rejoin(of("a", 3), first, at(0));
  membership.rejoin(of("b", 2), claim_of(1, {1, 3}), at(0));
  EXPECT_THAT(told(membership), IsEmpty());
  membership.rank_is_elastic(0, seat_of(4));
  EXPECT_THAT(told(membership), ElementsAre("0:table8@0,2,4/5", "1:table8@1,3/5"));
}

TEST(LaunchTakeOver, ANodeThatIsLostBeforeItIsDoneMayComeAgain) {
  Membership membership(new_leader());
  membership.rejoin(of("a", 3), claim_of(0, {0, 2, 4}), at(0));
  membership.rank_lost(0, seat_of(0), exit_3());
  membership.lost(0);
  EXPECT_EQ(membership.rejoin(of("a", 3), claim_of(0, {0, 2, 4}), at(1)).member, 1);
  membership.rejoin(of("b", 2), claim_of(1, {1, 3}), at(2));
  EXPECT_THAT(told(membership), ElementsAre("1:table8@0,2,4/5", "2:table8@1,3/5"));
}

TEST(LaunchTakeOver, IfAllThatCameAreLostTheJobEnds) {
  Membership membership(new_leader());
  membership.rejoin(of("a", 3), claim_of(0, {0, 2, 4}), at(0));
  membership.lost(0);
  membership.tick(at(16));
  const std::vector<MemberOrder> orders = membership.take_orders();
  ASSERT_EQ(orders.size(), 2u);
  EXPECT_EQ(orders[0].order.kind, Order::Kind::stop);
  EXPECT_EQ(orders[1].order.kind, Order::Kind::exit);
  EXPECT_EQ(orders[1].order.exit_code, 1);
}

TEST(LaunchTakeOver, CtrlCEndsItInTheMiddle) {
  Membership membership(new_leader());
  membership.rejoin(of("a", 3), claim_of(0, {0, 2, 4}), at(0));
  membership.end({.kind = Cause::Kind::interrupted, .node = kNodeOfLeader, .signal = 2});
  EXPECT_EQ(membership.rejoin(of("b", 2), claim_of(1, {1, 3}), at(1)).refusal, "the job is being ended");
  membership.tick(at(16));
  EXPECT_THAT(told(membership), ElementsAre("0:stop"));
  membership.ended(0);
  EXPECT_THAT(told(membership), ElementsAre("0:exit130"));
}

}  // namespace
}  // namespace serried::launch
