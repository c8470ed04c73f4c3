// The decisions over nodes, without processes, sockets or a clock.
#include "serried/launch/membership.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>

#include "tests/process/membership_tools.h"

namespace serried::launch {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// Orders as short texts: "1:start@2/5" is member 1, first rank 2 of 5.
std::vector<std::string> orders(Membership& membership) {
  std::vector<std::string> result;
  for (const auto& [member, order] : membership.take_orders()) {
    std::string text = std::to_string(member) + ":";
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

Membership two_nodes(int max_restarts = 0) {
  Membership membership(options_for(2, 2, max_restarts));
  EXPECT_EQ(membership.join(joiner("a", 2, 2, 2, 0), kBegin).member, 0);
  EXPECT_EQ(membership.join(joiner("b", 2, 2, 3, 1), kBegin).member, 1);
  EXPECT_THAT(orders(membership), ElementsAre("0:start@0/5", "1:start@2/5"));
  return membership;
}

// Two of at most four, one rank each, started after the last call.
Membership two_of_four(int max_restarts = 0) {
  Membership membership(options_for(2, 4, max_restarts));
  EXPECT_EQ(membership.join(joiner("a", 2, 4, 1), at(0)).refusal, "");
  EXPECT_EQ(membership.join(joiner("b", 2, 4, 1), at(1)).refusal, "");
  EXPECT_THAT(orders(membership), IsEmpty());
  membership.tick(at(4));
  EXPECT_THAT(orders(membership), ElementsAre("0:start@0/2", "1:start@1/2"));
  return membership;
}

TEST(LaunchMembership, EndsWithZeroWhenAllNodesAreDone) {
  Membership membership = two_nodes();
  membership.done(1);
  EXPECT_THAT(orders(membership), IsEmpty());
  membership.done(0);
  EXPECT_THAT(orders(membership), ElementsAre("0:exit0", "1:exit0"));
}

TEST(LaunchMembership, OneFailureStopsAllAndItsCodeIsTheJobs) {
  Membership membership = two_nodes();
  membership.failed(1, exit_3());
  EXPECT_THAT(orders(membership), ElementsAre("0:stop", "1:stop"));
  membership.failed(0, {.rank = 0, .exit_code = 9});  // came second
  membership.ended(0);
  EXPECT_THAT(orders(membership), IsEmpty());
  membership.ended(1);
  EXPECT_THAT(orders(membership), ElementsAre("0:exit3", "1:exit3"));
}

TEST(LaunchMembership, RestartsAllTogetherAsOftenAsAllowed) {
  Membership membership = two_nodes(1);
  for (int attempt = 0; attempt < 2; ++attempt) {
    membership.done(0);
    membership.failed(1, exit_3());
    orders(membership);
    membership.ended(0);
    membership.ended(1);
    if (attempt == 0) {
      EXPECT_THAT(orders(membership), ElementsAre("0:start@0/5", "1:start@2/5"));
    }
  }
  EXPECT_THAT(orders(membership), ElementsAre("0:exit3", "1:exit3"));
}

TEST(LaunchMembership, AnInterruptedJobDoesNotRestart) {
  Membership membership = two_nodes(5);
  membership.failed(1, exit_3());
  membership.failed(0, {.kind = Cause::Kind::interrupted, .signal = 2});
  orders(membership);
  membership.ended(0);
  membership.ended(1);
  EXPECT_THAT(orders(membership), ElementsAre("0:exit130", "1:exit130"));
}

TEST(LaunchMembership, ALostNodeEndsTheOthersWithoutRestart) {
  Membership membership = two_nodes(5);
  membership.lost(1);
  EXPECT_THAT(orders(membership), ElementsAre("0:stop"));
  membership.ended(0);
  EXPECT_THAT(orders(membership), ElementsAre("0:exit1"));
}

TEST(LaunchMembership, RefusesWhatDoesNotFit) {
  Membership membership(options_for(3, 3));
  const auto refusal = [&](const Joiner& one) { return membership.join(one, kBegin).refusal; };
  EXPECT_EQ(refusal(joiner("a", 3, 3, 1, 0)), "");
  EXPECT_EQ(refusal(joiner("b", 3, 3, 1, 1)), "");
  EXPECT_EQ(refusal(joiner("c", 3, 3, 1, 1)), "--node-rank 1 is taken by b");
  EXPECT_EQ(refusal(joiner("c", 3, 3, 1, 0)), "--node-rank 0 is taken by a");
  EXPECT_EQ(refusal(joiner("c", 4, 4, 1, 2)), "this node was started with --nnodes 4, node 0 with --nnodes 3");
  EXPECT_EQ(refusal(joiner("c", 2, 3, 1, 2)), "this node was started with --nnodes 2:3, node 0 with --nnodes 3");
  EXPECT_EQ(refusal(joiner("c", 3, 3, 0, 2)), "it brings 0 ranks");
  EXPECT_EQ(refusal(joiner("c", 3, 3, 2147483647, 2)), "it brings 2147483647 ranks");
  EXPECT_EQ(refusal(joiner("c", 3, 3, 1, 7)), "there is no node-rank 7");
  EXPECT_THAT(membership.missing(), ElementsAre(2));
  membership.lost(1);  // before the start it may come again
  EXPECT_THAT(membership.missing(), ElementsAre(1, 2));
}

TEST(LaunchMembership, ANodeThatRunsSomethingElseIsOfAnotherJob) {
  MembershipOptions options = options_for(2, 2);
  options.command = mark_of_command({"./train", "--lr", "1"});
  Membership membership(options);
  const auto join = [&](const std::vector<std::string>& command) {
    Joiner one = joiner("a", 2, 2, 1);
    one.command = mark_of_command(command);
    return membership.join(one, kBegin);
  };
  EXPECT_EQ(join({"train", "--lr", "2"}).refusal,
            "this node was started to run \"train --lr 2\", node 0 \"train --lr 1\"");
  EXPECT_TRUE(join({"train", "--lr", "2"}).is_of_another_job);
  EXPECT_NE(join({"train", "--lr 1"}).refusal, "");
  EXPECT_NE(join({"train", "--lr", "1", std::string(200, 'x')}).refusal, "");
  EXPECT_EQ(join({"/home/b/train", "--lr", "1"}).refusal, "");
}

TEST(LaunchMembership, TheNodeThatIsOneTooManyIsToldWhoIsThere) {
  Membership membership = two_nodes();
  EXPECT_EQ(membership.join(joiner("c", 2, 2, 1), at(9)).refusal, "the job has all of its 2 nodes: a, b");
  EXPECT_THAT(orders(membership), IsEmpty());
}

TEST(LaunchMembership, StartsAtOnceWithTheLastOfTheMost) {
  Membership membership(options_for(1, 3));
  for (const char* host : {"a", "b"}) EXPECT_EQ(membership.join(joiner(host, 1, 3, 2), at(1)).refusal, "");
  EXPECT_EQ(membership.deadline(), at(4));
  EXPECT_THAT(orders(membership), IsEmpty());
  membership.join(joiner("c", 1, 3, 1), at(2));
  EXPECT_THAT(orders(membership), ElementsAre("0:start@0/5", "1:start@2/5", "2:start@4/5"));
  EXPECT_EQ(membership.deadline(), kNever);
}

TEST(LaunchMembership, DoesNotStartIfEnoughWereThereAndOneWent) {
  Membership membership(options_for(2, 4));
  membership.join(joiner("a", 2, 4, 1), at(0));
  const int b = membership.join(joiner("b", 2, 4, 1), at(1)).member;
  membership.lost(b);
  membership.tick(at(100));
  EXPECT_THAT(orders(membership), IsEmpty());
  membership.join(joiner("c", 2, 4, 1), at(101));
  membership.tick(at(104));
  EXPECT_THAT(orders(membership), ElementsAre("0:start@0/2", "2:start@1/2"));
}

TEST(LaunchMembership, GoesOnWithoutALostNodeWhileEnoughAreThere) {
  Membership membership = two_of_four(1);
  membership.join(joiner("c", 2, 4, 1), at(5));
  membership.tick(at(8));
  EXPECT_THAT(orders(membership), ElementsAre("0:stop", "1:stop"));
  membership.ended(0);
  membership.ended(1);
  EXPECT_THAT(orders(membership), ElementsAre("0:start@0/3", "1:start@1/3", "2:start@2/3"));
  membership.lost(1, "it said nothing");
  const std::vector<MemberOrder> stops = membership.take_orders();
  ASSERT_EQ(stops.size(), 2u);
  EXPECT_TRUE(stops[0].order.cause.goes_on);
  membership.ended(0);
  membership.ended(2);
  const std::vector<MemberOrder> starts = membership.take_orders();
  ASSERT_EQ(starts.size(), 2u);
  EXPECT_EQ(starts[1].order.assignment.news, "restart 1 of 1: all ranks start again on 2 nodes");
  EXPECT_EQ(starts[1].order.assignment.attempt, 2);
  EXPECT_EQ(starts[1].order.assignment.node_rank, 1);
  membership.lost(2);  // no restart is left
  EXPECT_THAT(orders(membership), ElementsAre("0:stop"));
  membership.ended(0);
  EXPECT_THAT(orders(membership), ElementsAre("0:exit1"));
}

TEST(LaunchMembership, JoiningCountsNoRestartAndWaitsForOthersThatJoin) {
  Membership membership = two_of_four(0);
  membership.join(joiner("c", 2, 4, 1), at(10));
  membership.tick(at(12));
  EXPECT_THAT(orders(membership), IsEmpty());
  membership.join(joiner("d", 2, 4, 1), at(12));  // now nobody else can come
  const std::vector<MemberOrder> stops = membership.take_orders();
  ASSERT_EQ(stops.size(), 2u);
  EXPECT_EQ(describe(stops[0].order.cause, 2, 4),
            "[run] the job grows by c, d; its 2 ranks are ended to start again\n");
  membership.ended(1);
  membership.ended(0);
  EXPECT_THAT(orders(membership), ElementsAre("0:start@0/4", "1:start@1/4", "2:start@2/4", "3:start@3/4"));
}

TEST(LaunchMembership, ANodeThatComesAndGoesChangesNothing) {
  Membership membership = two_of_four();
  const int c = membership.join(joiner("c", 2, 4, 1), at(10)).member;
  membership.lost(c);
  EXPECT_EQ(membership.deadline(), kNever);
  membership.tick(at(20));
  EXPECT_THAT(orders(membership), IsEmpty());
  membership.join(joiner("d", 2, 4, 1), at(30));
  membership.tick(at(32));
  EXPECT_THAT(orders(membership), IsEmpty());  // a last call of its own
  membership.tick(at(33));
  EXPECT_THAT(orders(membership), ElementsAre("0:stop", "1:stop"));
}

TEST(LaunchMembership, ANodeThatComesWhileRanksAreEndedIsTakenWithoutACall) {
  Membership membership = two_of_four(1);
  membership.failed(1, exit_3());
  EXPECT_THAT(orders(membership), ElementsAre("0:stop", "1:stop"));
  membership.join(joiner("c", 2, 4, 1), at(10));
  membership.join(joiner("d", 2, 4, 1), at(10));
  EXPECT_EQ(membership.deadline(), kNever);  // or the leader would ask again and again until all have ended
  membership.tick(at(20));
  EXPECT_THAT(orders(membership), IsEmpty());
  membership.ended(0);
  membership.ended(1);
  EXPECT_THAT(orders(membership), ElementsAre("0:start@0/4", "1:start@1/4", "2:start@2/4", "3:start@3/4"));
  EXPECT_EQ(membership.deadline(), kNever);
}

TEST(LaunchMembership, ANodeThatComesWhileOthersFinishEndsWithThem) {
  Membership membership = two_of_four();
  membership.done(0);
  membership.join(joiner("c", 2, 4, 1), at(10));
  membership.tick(at(20));
  EXPECT_THAT(orders(membership), IsEmpty());
  membership.done(1);
  EXPECT_THAT(orders(membership), ElementsAre("0:exit0", "1:exit0", "2:exit0"));
}

TEST(LaunchMembership, ANodeLostDuringAChangeCountsAsAFailure) {
  for (const int max_restarts : {0, 1}) {
    Membership membership = two_of_four(max_restarts);
    membership.join(joiner("c", 2, 4, 1), at(10));
    membership.tick(at(13));
    membership.ended(0);
    EXPECT_THAT(orders(membership), ElementsAre("0:stop", "1:stop"));
    membership.lost(1);
    if (max_restarts == 0) {
      EXPECT_THAT(orders(membership), ElementsAre("0:exit1", "2:exit1"));
    } else {
      EXPECT_THAT(orders(membership), ElementsAre("0:start@0/2", "2:start@1/2"));
    }
  }
}

TEST(LaunchMembership, AMachineThatComesAgainGetsItsOldPlace) {
  Membership membership = two_of_four(3);
  membership.join(joiner("c", 2, 4, 1), at(5));
  membership.join(joiner("d", 2, 4, 1), at(5));
  membership.ended(0);
  membership.ended(1);
  orders(membership);
  membership.lost(1);
  membership.lost(2);
  membership.ended(0);
  membership.ended(3);
  EXPECT_THAT(orders(membership), ElementsAre("0:stop", "2:stop", "3:stop", "0:start@0/2", "3:start@1/2"));
  EXPECT_EQ(membership.join(joiner("c", 2, 4, 1), at(6)).member, 4);
  membership.tick(at(9));
  membership.ended(0);
  membership.ended(3);
  EXPECT_THAT(orders(membership), ElementsAre("0:stop", "3:stop", "0:start@0/3", "4:start@1/3", "3:start@2/3"));
}

/// A job with nodes that come, fail, finish and vanish at random, and what must hold of the orders they get.
class RandomJob {
 public:
  struct Ways {
    Seconds sit_out{0};
    bool leader_is_apart = false;
  };

  RandomJob(unsigned seed, int min_nodes, int max_nodes, Ways ways)
      : random_(seed), min_(min_nodes), max_(max_nodes), ways_(ways), membership_(options()) {
    join();
  }

  void step() {
    now_ += std::chrono::milliseconds(draw(2000));
    if (sits()) membership_.tick(now_);
    take();
    const int kind = draw(12);
    if (kind < 3) join();
    if (kind == 3 && nodes_.size() > 1) lose(pick_other());
    if (kind == 4 || (sits() && kind == 5))
      fail(draw(sits() ? 60 : 6) == 0 ? Cause::Kind::interrupted : Cause::Kind::rank_failed);
    if (kind == 6 && draw(sits() ? 40 : 2) == 0) finish(draw(5) == 0);
    if (kind > 5) membership_.tick(now_);
    if (kind > 8) answer_one();
    take();
  }

  // Everybody answers and nobody else comes: the job ends.
  void run_out() {
    for (int i = 0; i < 100 && !over_; ++i) {
      now_ += std::chrono::seconds(4);
      membership_.tick(now_);
      take();
      while (answer_one()) take();
      if (membership_.started()) finish(true);
      take();
      if (!membership_.started() && i > 2) fail(Cause::Kind::interrupted);
      take();
    }
    EXPECT_TRUE(over_);
  }

  int num_generations() const { return last_generation_ + 1; }
  int num_left_out() const { return num_left_out_; }
  bool over() const { return over_; }

 private:
  enum class State { waiting, running, done, told_to_stop, ended };

  MembershipOptions options() {
    MembershipOptions result = options_for(min_, max_, sits() ? 100 : draw(4));
    result.sit_out = ways_.sit_out;
    result.leader_is_apart = ways_.leader_is_apart;
    return result;
  }

  bool sits() const { return ways_.sit_out > Seconds(0); }

  int draw(int below) { return static_cast<int>(random_() % static_cast<unsigned>(below)); }

  void join() {
    const std::string host = "h" + std::to_string(draw(6));
    const auto joined = membership_.join(joiner(host, min_, max_, 1 + draw(3)), now_);
    if (joined.refusal.empty()) {
      hosts_[joined.member] = host;
      ++num_joins_[host];
      EXPECT_TRUE(nodes_.emplace(joined.member, State::waiting).second) << "a number used twice";
    } else {
      EXPECT_TRUE(over_ || nodes_.size() == static_cast<size_t>(max_)) << joined.refusal;
    }
    take();
  }

  int pick_other() { return std::next(nodes_.begin(), 1 + draw(static_cast<int>(nodes_.size()) - 1))->first; }

  void lose(int node) {
    nodes_.erase(node);
    membership_.lost(node);
  }

  void fail(Cause::Kind kind) {
    const bool last = sits() && draw(4) > 0;  // one that fails more often than the others
    const int node = last ? nodes_.rbegin()->first : std::next(nodes_.begin(), draw(int(nodes_.size())))->first;
    if (nodes_[node] != State::running && (membership_.started() || kind == Cause::Kind::rank_failed)) return;
    if (kind == Cause::Kind::rank_failed) failures_[hosts_[node]].push_back(now_);
    membership_.failed(node, {.kind = kind, .exit_code = 3, .signal = kind == Cause::Kind::interrupted ? 2 : 0});
  }

  void finish(bool all) {
    for (auto& [node, state] : nodes_) {
      if (state != State::running) continue;
      state = State::done;
      membership_.done(node);
      if (!all) return;
    }
  }

  bool answer_one() {
    for (auto& [node, state] : nodes_) {
      if (state != State::told_to_stop) continue;
      state = State::ended;
      membership_.ended(node);
      return true;
    }
    return false;
  }

  void take() {
    std::set<int> ranks;
    int starting = 0;
    for (const auto& [node, order] : membership_.take_orders()) {
      ASSERT_FALSE(over_ && order.kind != Order::Kind::exit) << "an order after the end";
      if (order.kind == Order::Kind::exit) over_ = true;
      if (node == kLeader) {
        EXPECT_TRUE(ways_.leader_is_apart);
        continue;
      }
      ASSERT_TRUE(nodes_.contains(node)) << "an order for a node that is gone";
      if (order.kind == Order::Kind::stop) nodes_[node] = State::told_to_stop;
      if (order.kind == Order::Kind::wait) leave_out(node);
      if (order.kind != Order::Kind::start) continue;
      if (starting++ == 0) begin(order.assignment);
      check_start(node, order.assignment, ranks);
    }
    if (starting == 0) return;
    EXPECT_GE(starting, min_);
    EXPECT_LE(starting, max_);
    const auto sits_out = [](const auto& node) { return node.second == State::waiting; };
    const auto num_sitting = std::count_if(nodes_.begin(), nodes_.end(), sits_out);
    for (const auto& [node, state] : nodes_) {
      if (state == State::waiting) expect_failures(node);
      const auto until = out_until_.find(node);
      const bool is_out = until != out_until_.end() && now_ < until->second;
      EXPECT_TRUE(!is_out || state == State::waiting || starting <= min_) << "it takes part, and nobody needs it";
    }
    EXPECT_EQ(static_cast<size_t>(starting + num_sitting), nodes_.size()) << "who is there takes part";
    EXPECT_EQ(ranks.size(), static_cast<size_t>(*ranks.rbegin()) + 1);
  }

  // Its ranks have failed three times within the span, and that has not been over for as long.
  void expect_failures(int node) {
    const std::vector<Time>& all = failures_[hosts_[node]];
    const auto recent = [&](Time failure) { return now_ - failure < 2 * ways_.sit_out; };
    EXPECT_GE(std::count_if(all.begin(), all.end(), recent), 3) << "node " << node << " is left out";
  }

  void leave_out(int node) {
    EXPECT_EQ(nodes_[node], State::ended);
    EXPECT_TRUE(node != 0 || ways_.leader_is_apart) << "who leads may not leave";
    nodes_[node] = State::waiting;
    ++num_left_out_;
    // Where it is plain since when: the only node of its host that ever came, and left out for the first time.
    const std::vector<Time>& all = failures_[hosts_[node]];
    const bool is_plain = num_joins_[hosts_[node]] == 1 && all.size() == 3;
    if (is_plain) out_until_[node] = all.back() + std::chrono::duration_cast<Clock::duration>(ways_.sit_out);
  }

  // One generation at a time: whoever had ranks has said that they have ended.
  void begin(const Assignment& assignment) {
    for (const auto& [node, state] : nodes_) {
      EXPECT_TRUE(state == State::waiting || state == State::ended) << "node " << node << " still has ranks";
    }
    EXPECT_EQ(assignment.attempt, last_generation_ + 1);
    last_generation_ = assignment.attempt;
  }

  void check_start(int node, const Assignment& assignment, std::set<int>& ranks) {
    EXPECT_EQ(assignment.attempt, last_generation_);
    EXPECT_TRUE(ways_.leader_is_apart || (node == 0) == (assignment.first_rank == 0)) << "the leader has rank 0";
    for (int i = 0; i < assignment.num_local; ++i) EXPECT_TRUE(ranks.insert(assignment.first_rank + i).second);
    nodes_[node] = State::running;
  }

  std::mt19937 random_;
  int min_;
  int max_;
  Ways ways_;
  Membership membership_;
  std::map<int, State> nodes_;
  std::map<int, std::string> hosts_;
  std::map<std::string, std::vector<Time>> failures_;
  std::map<std::string, int> num_joins_;
  std::map<int, Time> out_until_;
  int num_left_out_ = 0;
  Time now_ = kBegin;
  int last_generation_ = -1;
  bool over_ = false;
};

TEST(LaunchMembership, KeepsItsPromisesWhateverHappens) {
  int generations = 0;
  for (unsigned seed = 0; seed < 3000; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    RandomJob job(seed, 1 + static_cast<int>(seed % 3), 1 + static_cast<int>(seed % 3 + seed % 4),
                  {.leader_is_apart = seed % 5 == 0});
    for (int i = 0; i < 60 && !job.over(); ++i) job.step();
    job.run_out();
    generations += job.num_generations();
    if (::testing::Test::HasFailure()) break;
  }
  EXPECT_GT(generations, 3000);  // it was not all about jobs that never began
}

TEST(LaunchMembership, KeepsItsPromisesWhileNodesSitOut) {
  int left_out = 0;
  for (unsigned seed = 0; seed < 2000; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    RandomJob job(seed, 1 + static_cast<int>(seed % 2), 2 + static_cast<int>(seed % 3),
                  {.sit_out = Seconds(30), .leader_is_apart = seed % 2 == 0});
    for (int i = 0; i < 150 && !job.over(); ++i) job.step();
    job.run_out();
    left_out += job.num_left_out();
    if (::testing::Test::HasFailure()) break;
  }
  EXPECT_GT(left_out, 300);
}

}  // namespace
}  // namespace serried::launch
