// The decisions over ranks of `--keep-going`, without processes, sockets or a clock.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>
#include <utility>

#include "serried/launch/membership.h"
#include "serried/launch/standing.h"
#include "tests/process/membership_tools.h"

namespace serried::launch {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// Two of at most three nodes, of 2 and 1 ranks, in seats 0 to 2, all of which use Elastic.
Membership kept(int max_restarts = 0) {
  Membership membership(keeping(2, 3, max_restarts));
  membership.join(joiner("a", 2, 3, 2), at(0));
  membership.join(joiner("b", 2, 3, 1), at(0));
  membership.tick(at(3));
  EXPECT_THAT(tables(membership), ElementsAre("0:start0@0*,1*/3", "1:start0@2*/3"));
  membership.rank_is_elastic(0, 0);
  membership.rank_is_elastic(0, 1);
  membership.rank_is_elastic(1, 2);
  return membership;
}

TEST(LaunchKeepGoing, SurvivorsKeepTheirOrderAndNewcomersFollow) {
  Membership membership = kept(1);
  membership.rank_lost(0, 0, exit_3());
  EXPECT_THAT(tables(membership), ElementsAre("0:over0", "1:over0", "0:table1@0,2*/3", "1:table1@1/3"));
  // No restart is left: the next one is not started again.
  membership.rank_lost(1, 2, exit_3());
  EXPECT_THAT(tables(membership), ElementsAre("0:over1", "1:over1", "0:table2@0,1/2"));
  membership.rank_lost(1, 2, exit_3());  // told twice
  EXPECT_THAT(tables(membership), IsEmpty());
  membership.rank_done(0, 1);
  membership.rank_done(0, 3);
  EXPECT_THAT(tables(membership), ElementsAre("0:exit0", "1:exit0"));
}

TEST(LaunchKeepGoing, TheCauseSaysWhoGoesOn) {
  Membership membership = kept(1);
  membership.rank_lost(1, 2, exit_3());
  const Cause cause = membership.take_orders().at(0).order.cause;
  EXPECT_EQ(cause.rank, 2);
  EXPECT_EQ(cause.host, "b");
  EXPECT_EQ(cause.note, "the other 2 ranks go on, and it is started again");
  EXPECT_THAT(describe(cause, 3, 3), HasSubstr("[run] rank 2 of 3 on node 1 (b) (pid 0) exited with code 3\n"));
  EXPECT_EQ(
      describe({.kind = Cause::Kind::node_lost, .node = 1, .host = "b", .goes_on = true, .note = "so it is"}, 3, 2),
      "[run] lost the launcher of node 1 (b); so it is\n");
}

TEST(LaunchKeepGoing, AllEndIfOneThatLivesDoesNotUseElastic) {
  for (const int max_restarts : {0, 1}) {
    Membership membership(keeping(1, 1, max_restarts));
    membership.join(joiner("a", 1, 1, 3), at(0));
    membership.rank_is_elastic(0, 0);
    membership.rank_is_elastic(0, 2);
    tables(membership);
    membership.rank_lost(0, 2, exit_3());
    const std::vector<MemberOrder> stops = membership.take_orders();
    ASSERT_EQ(stops.size(), 1u);
    EXPECT_THAT(describe(stops[0].order.cause, 3, 1),
                HasSubstr("--keep-going keeps nobody: rank 1 has not made a serried::Elastic by now"));
    membership.ended(0);
    // As ever then: all start again, or the job ends.
    EXPECT_THAT(tables(membership), ElementsAre(max_restarts == 0 ? "0:exit3" : "0:start1@0*,1*,2*/3"));
  }
}

TEST(LaunchKeepGoing, ALostRankThatAloneDidNotUseElasticIsNoReason) {
  Membership membership(keeping(1, 1));
  membership.join(joiner("a", 1, 1, 2), at(0));
  membership.rank_is_elastic(0, 0);
  tables(membership);
  membership.rank_lost(0, 1, exit_3());
  EXPECT_THAT(tables(membership), ElementsAre("0:over0", "0:table1@0/1"));
}

TEST(LaunchKeepGoing, NodesJoinWithoutAnEndOfTheTableBefore) {
  Membership membership = kept();
  EXPECT_EQ(membership.join(joiner("c", 2, 3, 2), at(10)).member, 2);  // the last that can come
  EXPECT_THAT(tables(membership), ElementsAre("0:table1@0,1/5", "1:table1@2/5", "2:table1@3*,4*/5"));
  membership.lost(1);
  EXPECT_THAT(tables(membership), ElementsAre("0:over1", "2:over1", "0:table2@0,1/4", "2:table2@2,3/4"));
}

TEST(LaunchKeepGoing, NodesThatJoinWaitUntilAllRanksUseElastic) {
  Membership membership(keeping(1, 2));
  membership.join(joiner("a", 1, 2, 1), at(0));
  membership.tick(at(3));
  tables(membership);
  membership.join(joiner("b", 1, 2, 1), at(4));
  EXPECT_THAT(tables(membership), IsEmpty());
  membership.rank_is_elastic(0, 0);
  EXPECT_THAT(tables(membership), ElementsAre("0:table1@0/2", "1:table1@1*/2"));
}

TEST(LaunchKeepGoing, BelowTheLeastNumberOfNodesTheOthersWait) {
  Membership membership = kept();
  membership.lost(1);
  EXPECT_THAT(tables(membership), ElementsAre("0:over0"));
  membership.tick(at(10));
  EXPECT_EQ(membership.deadline(), at(70));
  membership.rank_lost(0, 1, exit_3());  // nothing to be told but that
  EXPECT_THAT(tables(membership), ElementsAre("0:over0"));
  membership.join(joiner("b", 2, 3, 1), at(20));
  membership.tick(at(23));
  EXPECT_THAT(tables(membership), ElementsAre("0:table1@0/2", "2:table1@1*/2"));
  EXPECT_EQ(membership.deadline(), kNever);
}

TEST(LaunchKeepGoing, TheWaitForNodesHasAnEnd) {
  Membership membership = kept(5);
  membership.lost(1);
  tables(membership);
  membership.tick(at(10));
  membership.tick(at(70));
  const std::vector<MemberOrder> stops = membership.take_orders();
  ASSERT_EQ(stops.size(), 1u);
  EXPECT_THAT(describe(stops[0].order.cause, 2, 3),
              HasSubstr("[run] 1 of at least 2 nodes are left, and no other joined within 60 s\n  fix: "));
  membership.ended(0);
  EXPECT_THAT(tables(membership), ElementsAre("0:exit1"));
}

TEST(LaunchKeepGoing, NobodyIsStartedOnceARankIsDone) {
  Membership membership = kept(5);
  membership.rank_done(0, 0);
  EXPECT_THAT(tables(membership), IsEmpty());
  membership.join(joiner("c", 2, 3, 2), at(10));
  membership.rank_lost(0, 1, exit_3());
  EXPECT_THAT(tables(membership), ElementsAre("0:over0", "1:over0", "1:table1@0/1"));
  membership.rank_done(1, 2);
  EXPECT_THAT(tables(membership), ElementsAre("0:exit0", "1:exit0", "2:exit0"));
}

TEST(LaunchKeepGoing, WhenNobodyIsLeftTheJobEndsOrStartsAgain) {
  for (const int max_restarts : {0, 1}) {
    Membership membership(keeping(1, 1, max_restarts));
    membership.join(joiner("a", 1, 1, 1), at(0));
    membership.rank_is_elastic(0, 0);
    tables(membership);
    membership.rank_lost(0, 0, exit_3());
    EXPECT_THAT(tables(membership), ElementsAre("0:stop"));
    membership.ended(0);
    EXPECT_THAT(tables(membership), ElementsAre(max_restarts == 0 ? "0:exit3" : "0:start1@0*/1"));
  }
}

TEST(LaunchKeepGoing, OrdersComeBackFromTheirMessages) {
  Membership membership = kept(1);
  membership.rank_lost(0, 0, exit_3());
  for (const auto& [member, order] : membership.take_orders()) {
    const Order again = order_from(to_message(order));
    EXPECT_EQ(again.kind, order.kind);
    EXPECT_EQ(again.assignment.attempt, order.assignment.attempt);
    EXPECT_EQ(again.assignment.seats, order.assignment.seats);
    EXPECT_EQ(again.assignment.keep_going, order.assignment.keep_going);
    EXPECT_EQ(again.cause.note, order.cause.note);
  }
  Message cut = to_message(Order{.kind = Order::Kind::table, .assignment = {.seats = {{1, 2, true}}}});
  cut.pop_back();
  EXPECT_THROW(order_from(cut), std::runtime_error);
}

/// A job whose nodes and ranks come, fail, finish and vanish at random, and what must hold of the tables.
class RandomKeptJob {
 public:
  RandomKeptJob(unsigned seed, int min_nodes, int max_nodes)
      : random_(seed), min_(min_nodes), max_(max_nodes), options_(options(seed)), membership_(options_) {
    join();
  }

  void step() {
    now_ += std::chrono::milliseconds(draw(3000));
    const int kind = draw(16);
    if (kind < 3) join();
    if (kind == 3 && nodes_.size() > 1) lose_node();
    if (kind == 4 && draw(8) == 0) interrupt();
    if (kind == 5 || kind == 6) end_rank(true);
    if (kind == 7 && draw(3) == 0) end_rank(false);
    if (kind > 7 && kind < 12) say_elastic(draw(10) == 0 ? 1 : 100);
    if (kind > 9) membership_.tick(now_);
    if (kind > 13) answer_one();
    take();
    if (options_.leader_is_apart && draw(12) == 0) replace_leader();
  }

  // Nobody else comes, all ranks end well, and everybody answers: the job ends.
  void run_out() {
    for (int i = 0; i < 100 && !over_; ++i) {
      now_ += std::chrono::seconds(61);
      membership_.tick(now_);
      take();
      while (answer_one()) take();
      while (end_rank(false)) take();
      if (!membership_.started() && i > 2) interrupt();
      take();
    }
    EXPECT_TRUE(over_);
  }

  int num_tables() const { return num_tables_; }
  int num_leaders() const { return num_leaders_; }
  bool over() const { return over_; }

 private:
  struct Launcher {
    Joiner joiner;
    Standing standing = {};
  };
  struct Rank {
    int node;
    int rank;
    bool elastic;
  };

  MembershipOptions options(unsigned seed) {
    MembershipOptions result = keeping(min_, max_, draw(5));
    result.leader_is_apart = seed % 5 == 0;
    if (seed % 3 != 0) return result;
    result.sit_out = Seconds(20);
    result.max_restarts = 20;
    return result;
  }

  int draw(int below) { return static_cast<int>(random_() % static_cast<unsigned>(below)); }

  void join() {
    const Joiner it = joiner("h" + std::to_string(draw(6)), min_, max_, 1 + draw(3));
    const auto joined = membership_.join(it, now_);
    if (joined.refusal.empty()) {
      EXPECT_TRUE(nodes_.emplace(joined.member, false).second) << "a number used twice";
      launchers_[joined.member] = {.joiner = it};
    }
    take();
  }

  // It is killed. Another one is told by the launchers where the job is, but for some that do not come.
  void replace_leader() {
    const auto stops = [](const auto& node) { return node.second; };
    const auto outlives = [](const auto& entry) { return entry.second.standing.outlives_leader(); };
    if (over_ || std::any_of(nodes_.begin(), nodes_.end(), stops)) return;
    const auto is_newest = [&](const auto& entry) {
      return outlives(entry) && entry.second.standing.generation() == last_generation_;
    };
    if (std::none_of(launchers_.begin(), launchers_.end(), is_newest)) return;
    ++num_leaders_;
    membership_ = Membership(options_);
    const std::map<int, bool> before = std::exchange(nodes_, {});
    std::map<int, Launcher> launchers = std::exchange(launchers_, {});
    std::map<int, Rank> ranks = std::exchange(ranks_, {});
    bool newest_came = false;
    for (const bool claims : {true, false}) {
      for (auto& [node, launcher] : launchers) {
        if (outlives(std::pair(node, launcher)) != claims) continue;
        // Of the newest table at least one comes: its number is known to nobody else.
        const bool knows_newest = claims && launcher.standing.generation() == last_generation_;
        if ((!knows_newest || std::exchange(newest_came, true)) && draw(10) == 0) continue;
        const auto joined = claims ? membership_.rejoin(launcher.joiner, launcher.standing.claim(true), now_)
                                   : membership_.join(launcher.joiner, now_);
        if (!joined.refusal.empty()) continue;
        nodes_[joined.member] = false;
        launchers_[joined.member] = launcher;
        for (const auto& [seat, rank] : ranks) {
          if (rank.node != node) continue;
          ranks_[seat] = rank;
          ranks_[seat].node = joined.member;
        }
        for (const Message& end : launcher.standing.ends()) {
          const int seat = number_in(end[1]);
          end[0] == "rank_lost" ? membership_.rank_lost(joined.member, seat, exit_3())
                                : membership_.rank_done(joined.member, seat);
        }
      }
    }
    now_ += std::chrono::seconds(20);
    membership_.tick(now_);
    for (const Membership::Refused& refused : membership_.take_refused()) forget(refused.member);
    take();
  }

  void forget(int node) {
    nodes_.erase(node);
    launchers_.erase(node);
    std::erase_if(ranks_, [&](const auto& entry) { return entry.second.node == node; });
  }

  void lose_node() {
    const int node = std::next(nodes_.begin(), 1 + draw(static_cast<int>(nodes_.size()) - 1))->first;
    forget(node);
    membership_.lost(node);
  }

  void interrupt() {
    if (!nodes_.empty()) membership_.failed(nodes_.begin()->first, {.kind = Cause::Kind::interrupted, .signal = 2});
  }

  bool end_rank(bool badly) {
    if (ranks_.empty()) return false;
    const auto ended = std::next(ranks_.begin(), draw(static_cast<int>(ranks_.size())));
    const auto [seat, rank] = *ended;
    ranks_.erase(ended);
    Standing& standing = launchers_.at(rank.node).standing;
    badly ? standing.rank_lost(seat, exit_3()) : standing.rank_done(seat);
    badly ? membership_.rank_lost(rank.node, seat, exit_3()) : membership_.rank_done(rank.node, seat);
    return true;
  }

  void say_elastic(int count) {
    for (auto& [seat, rank] : ranks_) {
      if (count-- <= 0) return;
      rank.elastic = true;
      launchers_.at(rank.node).standing.rank_is_elastic(seat);
      membership_.rank_is_elastic(rank.node, seat);
    }
  }

  bool answer_one() {
    for (auto& [node, told_to_stop] : nodes_) {
      if (!std::exchange(told_to_stop, false)) continue;
      std::erase_if(ranks_, [&, n = node](const auto& entry) { return entry.second.node == n; });
      membership_.ended(node);
      return true;
    }
    return false;
  }

  void take() {
    std::map<int, int> table;  // rank to seat, of the generation that is being told
    int generation = -1;
    int world_size = 0;
    for (const auto& [node, order] : membership_.take_orders()) {
      if (node == kLeader && order.kind == Order::Kind::exit) over_ = true;
      if (!nodes_.contains(node)) continue;  // it was told before it was lost
      launchers_.at(node).standing.hear(order);
      ASSERT_FALSE(over_ && order.kind != Order::Kind::exit) << "an order after the end";
      if (order.kind == Order::Kind::stop) nodes_[node] = true;
      if (order.kind == Order::Kind::exit) over_ = true;
      if (order.kind == Order::Kind::over) {
        EXPECT_EQ(order.assignment.attempt, last_generation_) << "what is over is the last";
      }
      if (order.kind != Order::Kind::start && order.kind != Order::Kind::table) continue;
      if (order.assignment.attempt != generation) {
        check_whole(table, world_size);
        begin(order, table);
        generation = order.assignment.attempt;
        world_size = order.assignment.world_size;
      }
      take_seats(node, order.assignment, table);
    }
    check_whole(table, world_size);
  }

  void begin(const Order& order, std::map<int, int>& table) {
    table.clear();
    ++num_tables_;
    EXPECT_EQ(order.assignment.attempt, last_generation_ + 1) << "no number is used twice";
    last_generation_ = order.assignment.attempt;
    if (order.kind == Order::Kind::start) {
      EXPECT_TRUE(ranks_.empty()) << "ranks of before still run";
    }
    EXPECT_GE(static_cast<int>(nodes_.size()), min_);
  }

  void take_seats(int node, const Assignment& assignment, std::map<int, int>& table) {
    for (const Seat& seat : assignment.seats) {
      EXPECT_TRUE(table.emplace(seat.rank, seat.number).second) << "two have one rank";
      EXPECT_EQ(seat.fresh, used_.insert(seat.number).second) << "who is new is started, who is not lives on";
      if (seat.fresh) ranks_[seat.number] = {.node = node, .rank = -1, .elastic = assignment.attempt > 0};
      const auto rank = ranks_.find(seat.number);
      if (rank == ranks_.end()) continue;  // it has ended since
      EXPECT_EQ(rank->second.node, node) << "a rank in two places";
    }
  }

  // All ranks that live are in it, numbered from 0, in the order they had.
  void check_whole(const std::map<int, int>& table, int world_size) {
    if (table.empty()) return;
    EXPECT_EQ(static_cast<int>(table.size()), world_size);
    EXPECT_EQ(table.rbegin()->first, world_size - 1);
    int last = -1;
    bool newcomers = false;
    for (const auto& [rank, seat] : table) {
      const auto found = ranks_.find(seat);
      if (found == ranks_.end()) continue;
      EXPECT_FALSE(newcomers && found->second.rank >= 0) << "newcomers come last";
      newcomers = found->second.rank < 0;
      if (newcomers) continue;
      EXPECT_GT(found->second.rank, last) << "the order changed";
      last = found->second.rank;
    }
    for (auto& [seat, rank] : ranks_) {
      const auto place =
          std::find_if(table.begin(), table.end(), [&, s = seat](const auto& e) { return e.second == s; });
      EXPECT_TRUE(place != table.end()) << "one that lives was left out";
      if (place != table.end()) rank.rank = place->first;
    }
  }

  std::mt19937 random_;
  int min_;
  int max_;
  MembershipOptions options_;
  Membership membership_;
  std::map<int, Launcher> launchers_;
  std::map<int, bool> nodes_;  // whether it was told to stop
  std::map<int, Rank> ranks_;  // that live, by seat
  std::set<int> used_;         // seats
  Time now_ = kBegin;
  int last_generation_ = -1;
  int num_tables_ = 0;
  int num_leaders_ = 0;
  bool over_ = false;
};

TEST(LaunchKeepGoing, KeepsItsPromisesWhateverHappens) {
  int tables = 0;
  int leaders = 0;
  for (unsigned seed = 0; seed < 3000; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    RandomKeptJob job(seed, 1 + static_cast<int>(seed % 3), 1 + static_cast<int>(seed % 3 + seed % 4));
    for (int i = 0; i < 80 && !job.over(); ++i) job.step();
    job.run_out();
    tables += job.num_tables();
    leaders += job.num_leaders();
    if (::testing::Test::HasFailure()) break;
  }
  EXPECT_GT(tables, 6000);
  EXPECT_GT(leaders, 500);
}

}  // namespace
}  // namespace serried::launch
