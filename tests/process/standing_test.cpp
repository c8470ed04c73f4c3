// What a launcher remembers of its ranks' table, for a leader that comes in the place of a lost one.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <stdexcept>

#include "serried/launch/standing.h"
#include "tests/process/membership_tools.h"

namespace serried::launch {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

Order table_of(Order::Kind kind, int generation, std::vector<Seat> seats) {
  return {.kind = kind,
          .assignment = {.attempt = generation,
                         .world_size = 6,
                         .node_rank = 1,
                         .num_nodes = 3,
                         .master_host = "h0",
                         .master_port = 77,
                         .run_id = "run",
                         .job_secret = "secret",
                         .keep_going = true,
                         .seats = std::move(seats),
                         .restarts = 2,
                         .next_seat = 9,
                         .num_with_leader = 3}};
}

TEST(LaunchStanding, SaysWhoLivesWhoUsesElasticAndHowOthersEnded) {
  Standing standing;
  EXPECT_FALSE(standing.outlives_leader());
  standing.hear(table_of(Order::Kind::start, 0, {{4, 3}, {5, 4}, {6, 5}}));
  EXPECT_TRUE(standing.outlives_leader());
  EXPECT_TRUE(standing.is_broken_without_leader());
  standing.rank_is_elastic(4);
  standing.rank_is_elastic(5);
  standing.rank_lost(5, exit_3());
  const Claim claim = standing.claim(true);
  EXPECT_EQ(claim.run_id, "run");
  EXPECT_EQ(claim.job_secret, "secret");
  EXPECT_EQ(claim.world_size, 6);
  EXPECT_EQ(claim.num_nodes, 3);
  EXPECT_EQ(claim.node_rank, 1);
  EXPECT_EQ(claim.num_with_leader, 3);
  EXPECT_EQ(claim.restarts, 2);
  EXPECT_EQ(claim.next_seat, 9);
  EXPECT_EQ(claim.master_host, "h0");
  EXPECT_EQ(claim.master_port, 77);
  EXPECT_TRUE(claim.leader_was_apart);
  EXPECT_THAT(claim.seats, ElementsAre(ClaimedSeat{4, 3, true, true}, ClaimedSeat{5, 4, true, false},
                                       ClaimedSeat{6, 5, false, true}));
  EXPECT_THAT(standing.ends(), ElementsAre(lost_message(5, exit_3())));

  // The leader has heard of it: in the next table it is not there, and one in its place is.
  standing.hear(table_of(Order::Kind::table, 1, {{4, 3, false}, {6, 4, false}, {9, 5, true}}));
  EXPECT_EQ(standing.generation(), 1);
  EXPECT_THAT(standing.ends(), IsEmpty());
  EXPECT_THAT(standing.claim(true).seats, ElementsAre(ClaimedSeat{4, 3, true, true}, ClaimedSeat{6, 4, false, true},
                                                      ClaimedSeat{9, 5, true, true}));
  standing.rank_done(6);
  EXPECT_THAT(standing.ends(), ElementsAre(Message{"rank_done", "6"}));
  EXPECT_TRUE(standing.claim(true).any_done);
  EXPECT_FALSE(standing.is_done());
  standing.rank_done(4);
  standing.rank_done(9);
  EXPECT_TRUE(standing.is_done());
  EXPECT_FALSE(any_lives(standing.claim(true)));
}

TEST(LaunchStanding, ATableIsBrokenIfTheLeaderOrThisNodeHasLostARankOfIt) {
  Standing standing;
  Order table = table_of(Order::Kind::start, 0, {{4, 3}, {5, 4}});
  table.assignment.num_with_leader = 0;
  standing.hear(table);
  standing.rank_done(4);
  EXPECT_FALSE(standing.is_broken_without_leader());
  standing.rank_lost(5, exit_3());
  EXPECT_TRUE(standing.is_broken_without_leader());
}

TEST(LaunchStanding, NobodyOutlivesALeaderThatOrdersTheEndOrDoesNotKeepGoing) {
  Standing standing;
  standing.hear(table_of(Order::Kind::start, 0, {{4, 3}}));
  standing.hear({.kind = Order::Kind::over});
  EXPECT_TRUE(standing.outlives_leader());
  standing.hear({.kind = Order::Kind::stop});
  EXPECT_FALSE(standing.outlives_leader());
  Order plain = table_of(Order::Kind::start, 1, {});
  plain.assignment.keep_going = false;
  standing.hear(plain);
  EXPECT_FALSE(standing.outlives_leader());
}

TEST(LaunchStanding, ClaimsComeBackFromTheirMessages) {
  Standing standing;
  standing.hear(table_of(Order::Kind::start, 4, {{4, 3}, {5, 4}}));
  standing.rank_done(5);
  const Claim claim = standing.claim(false);
  Message message = to_fields(claim);
  EXPECT_EQ(claim_from_fields(message, 0), claim);
  EXPECT_THROW(claim_from_fields(message, 1), std::runtime_error);
  message.pop_back();
  EXPECT_THROW(claim_from_fields(message, 0), std::runtime_error);
  EXPECT_THROW(claim_from_fields({"hello"}, 2), std::runtime_error);
  for (const auto& spoil : std::vector<std::function<void(Claim&)>>{
           [](Claim& c) { c.generation = -1; }, [](Claim& c) { c.run_id = ""; }, [](Claim& c) { c.world_size = 0; },
           [](Claim& c) { c.num_with_leader = 7; }, [](Claim& c) { c.next_seat = 5; },
           [](Claim& c) { c.seats[0].rank = 6; }, [](Claim& c) { c.restarts = 1 << 30; }}) {
    Claim bad = claim;
    spoil(bad);
    EXPECT_THROW(claim_from_fields(to_fields(bad), 0), std::runtime_error);
  }
}

}  // namespace
}  // namespace serried::launch
