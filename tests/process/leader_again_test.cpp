// A leader that is killed while the ranks of its job live on, and one that is started in its place.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <signal.h>

#include <memory>
#include <regex>

#include "serried/launch/socket.h"
#include "tests/process/command.h"

namespace serried::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

std::string meets_at(int port) {
  return "127.0.0.1:" + std::to_string(port);
}

std::vector<std::string> head(int port, const std::string& nodes, std::vector<std::string> more = {"--keep-going"}) {
  const std::string last_call = nodes.starts_with("1") ? "20" : "0.3";  // both nodes of a test begin together
  more.insert(more.begin(), {"rendezvous", "--listen", meets_at(port), "--nnodes", nodes, "--last-call", last_call});
  return more;
}

std::vector<std::string> node_of(int port, const std::string& nodes, std::vector<std::string> more = {}) {
  more.insert(more.begin(), {"run", "--rendezvous", meets_at(port), "--nnodes", nodes});
  more.push_back(SERRIED_ELASTIC_RANK);
  return more;
}

/// Two nodes of one rank each, under a leader without ranks that is killed.
struct Orphaned {
  explicit Orphaned(const std::vector<std::string>& leader_options = {"--keep-going"},
                    const std::vector<std::string>& node_options = {}, const std::string& nodes = "2:3")
      : head_options(head(port, nodes, leader_options)) {
    auto leader = std::make_unique<Command>(head_options);
    leader->wait_for("leads the job");
    for (int i = 0; i < 2; ++i) {
      node.push_back(std::make_unique<Command>(node_of(port, nodes, node_options)));
    }
    for (const auto& each : node) each->wait_for("began in generation 0");
    leader->send(SIGKILL);
    EXPECT_EQ(leader->finish().exit_code, 128 + SIGKILL);
    for (const auto& each : node) {
      each->wait_for("[run] lost the leader (127.0.0.1); the ranks here go on, for up to ");
      EXPECT_THAT(each->so_far(), Not(HasSubstr("over ")));
    }
  }

  void expect_nothing_left() {
    for (const auto& each : node) EXPECT_TRUE(each->nothing_left());
  }

  int port = free_port();
  std::vector<std::string> head_options;
  std::vector<std::unique_ptr<Command>> node;
};

// Of a rank that said "pid 17 began in generation 0 as 1 of 3".
pid_t process_of(const Command& node, const std::string& as) {
  std::smatch match;
  const std::regex began("pid (\\d+) began in generation " + as);
  EXPECT_TRUE(std::regex_search(node.so_far(), match, began)) << "no " << as << " in:\n" << node.so_far();
  return match.empty() ? 0 : std::stoi(match[1]);
}

TEST(LeaderAgain, RanksLiveOnWithoutOneAndMembershipWorksAgain) {
  Orphaned job({"--keep-going", "--max-restarts", "1"});
  Command leader(job.head_options);
  leader.wait_for("[run] the job runs, in generation 0, and has lost its leader: it is led from here on\n");
  for (const auto& each : job.node) {
    each->wait_for("[run] a leader is at " + meets_at(job.port) + " again\n");
    each->wait_for("table 1 ");
    EXPECT_THAT(each->so_far(), Not(HasSubstr("over "))) << "nobody was lost";
  }
  leader.wait_for("[run] a leader is at its place again: 2 ranks\n");
  // A loss, a rank in its place, and a node that comes.
  ::kill(process_of(*job.node[1], "0 as . of 2"), SIGKILL);
  job.node[1]->wait_for("began in generation 2 as 1 of 2");
  job.node[0]->wait_for("over 1 rank ");
  job.node[0]->wait_for("table 2 0 2 ");
  Command third(node_of(job.port, "2:3"));
  third.wait_for("began in generation 3 as 2 of 3");
  // And another leader again.
  leader.send(SIGKILL);
  EXPECT_EQ(leader.finish().exit_code, 128 + SIGKILL);
  for (const auto& each : job.node) each->wait_for("lost the leader", 2);
  third.wait_for("lost the leader");
  Command last(job.head_options);
  third.wait_for("table 4 2 3 ");
  // The only restart is used up.
  ::kill(process_of(third, "3 as 2 of 3"), SIGKILL);
  job.node[0]->wait_for("table 5 0 2 ");
  last.send(SIGINT);
  EXPECT_EQ(last.finish().exit_code, 128 + SIGINT);
  for (const auto& each : job.node) EXPECT_EQ(each->finish().exit_code, 128 + SIGINT);
  EXPECT_EQ(third.finish().exit_code, 128 + SIGINT);
  job.expect_nothing_left();
  EXPECT_TRUE(third.nothing_left());
}

TEST(LeaderAgain, OneWithRanksBringsNewOnesAndTheOthersKeepTheirs) {
  const int port = free_port();
  const auto start = [&](const std::string& node_rank, const std::string& ranks) {
    return std::make_unique<Command>(node_of(port, "2", {"--keep-going", "--node-rank", node_rank, "-n", ranks}));
  };
  auto first = start("0", "1");
  auto second = start("1", "2");
  first->wait_for("began in generation 0");
  second->wait_for("began in generation 0", 2);
  first->send(SIGKILL);
  EXPECT_EQ(first->finish().exit_code, 128 + SIGKILL);
  EXPECT_TRUE(first->nothing_left());
  second->wait_for("over 0 lost the launcher of node 0 (127.0.0.1); the ranks here wait, for up to 300 s", 2);
  first = start("0", "1");
  first->wait_for("began in generation 2 as 2 of 3");
  for (const char* rank : {"0", "1"}) second->wait_for("table 2 " + std::string(rank) + " 3 ");
  ::kill(process_of(*first, "2 as 2 of 3"), SIGUSR2);
  for (const char* as : {"0 as 1 of 3", "0 as 2 of 3"}) ::kill(process_of(*second, as), SIGUSR2);
  for (const auto* each : {&first, &second}) {
    const Result result = (*each)->finish();
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_TRUE((*each)->nothing_left());
  }
}

TEST(LeaderAgain, WhereNoneComesInTimeTheJobEndsAndSaysWhere) {
  Orphaned job({"--keep-going"}, {"--rejoin-timeout", "6"});
  for (const auto& each : job.node) {
    each->wait_for("[run] waiting for a leader at " + meets_at(job.port) +
                   " since 5 s (Connection refused); after 6 s the ranks here are ended\n");
    const Result result = each->finish();
    EXPECT_EQ(result.exit_code, 1);
    EXPECT_THAT(result.err, ::testing::ContainsRegex("\\[run\\] no leader was at " + meets_at(job.port) +
                                                     " again within 6 s: tried [0-9]+ times, at last: Connection "
                                                     "refused; the ranks here are ended\n  fix: start the launcher "
                                                     "that led the job there again, with the same command line, or "
                                                     "raise --rejoin-timeout\n  at:  node [01] \\("));
  }
  job.expect_nothing_left();
}

TEST(LeaderAgain, WithoutATimeForItTheJobEndsWithItsLeader) {
  const int port = free_port();
  Command leader(head(port, "2"));
  leader.wait_for("leads the job");
  const std::vector<std::string> options = {"--rejoin-timeout", "0"};
  Command first(node_of(port, "2", options)), second(node_of(port, "2", options));
  for (Command* each : {&first, &second}) each->wait_for("began in generation 0");
  leader.send(SIGKILL);
  for (Command* each : {&first, &second}) {
    const Result result = each->finish();
    EXPECT_EQ(result.exit_code, 1);
    EXPECT_THAT(result.err, HasSubstr("[run] lost the leader (127.0.0.1); its 2 ranks are ended\n"));
    EXPECT_TRUE(each->nothing_left());
  }
}

TEST(LeaderAgain, OneThatDoesNotFitIsToldAndTheRightOneIsTaken) {
  Orphaned job;
  {
    Command other(head(job.port, "2:4"));
    for (const auto& each : job.node) {
      each->wait_for(
          "[run] the leader at " + meets_at(job.port) +
          " refuses: this node was started with --nnodes 2:3, the leader with --nnodes 2:4\n  fix: start the "
          "leader again with the command line of the one that was lost\n");
    }
    other.wait_for("[run] refused a launcher on " + launch::host_name() + ": this node was started with --nnodes 2:3");
  }
  {
    Command other(head(job.port, "2:3", {}));
    for (const auto& each : job.node) {
      each->wait_for("refuses: the ranks of this node live on under --keep-going, and this leader was started without");
    }
  }
  Command leader(job.head_options);
  for (const auto& each : job.node) each->wait_for("table 1 ");
  leader.send(SIGTERM);
  for (const auto& each : job.node) EXPECT_EQ(each->finish().exit_code, 128 + SIGTERM);
  job.expect_nothing_left();
}

TEST(LeaderAgain, OneOfAnotherTokenIsNotTaken) {
  const int port = free_port();
  const std::vector<std::string> right = {"SERRIED_TOKEN=" + std::string(64, 'a')};
  const std::vector<std::string> wrong = {"SERRIED_TOKEN=" + std::string(64, 'b')};
  auto leader = std::make_unique<Command>(head(port, "2"), right);
  leader->wait_for("leads the job");
  Command first(node_of(port, "2"), right), second(node_of(port, "2"), right);
  for (Command* each : {&first, &second}) each->wait_for("began in generation 0");
  const auto replace_by = [&](const std::vector<std::string>& token) {
    leader->send(SIGKILL);
    EXPECT_EQ(leader->finish().exit_code, 128 + SIGKILL);
    leader = std::make_unique<Command>(head(port, "2"), token);
    leader->wait_for("leads the job");
  };
  replace_by(wrong);
  for (Command* each : {&first, &second}) {
    each->wait_for(" s (node 0 at " + meets_at(port) + " has another token than this node); after 300 s ");
  }
  replace_by(right);
  for (Command* each : {&first, &second}) each->wait_for("table 1 ");
  leader->send(SIGINT);
  for (Command* each : {&first, &second}) EXPECT_EQ(each->finish().exit_code, 128 + SIGINT);
}

TEST(LeaderAgain, WhoIsLostWhileThereIsNoneIsReplacedByTheNext) {
  Orphaned job({"--keep-going", "--max-restarts", "1"}, {"-n", "2"});
  ::kill(process_of(*job.node[0], "0 as [02] of 4"), SIGKILL);
  // The other rank of its node is told at once, those of other nodes by the next leader.
  job.node[0]->wait_for("  the other ranks here wait for a leader at " + meets_at(job.port));
  job.node[0]->wait_for("over 0 rank ");
  EXPECT_THAT(job.node[1]->so_far(), Not(HasSubstr("over ")));
  Command leader(job.head_options);
  job.node[1]->wait_for("over 0 rank ", 2);
  job.node[1]->wait_for("table 1 ", 2);
  job.node[0]->wait_for("began in generation 1 as 3 of 4");
  leader.send(SIGINT);
  for (const auto& each : job.node) EXPECT_EQ(each->finish().exit_code, 128 + SIGINT);
  job.expect_nothing_left();
}

TEST(LeaderAgain, CtrlCEndsANodeWithoutLeaderAndTheOthersAreLedOn) {
  Orphaned job({"--keep-going", "--lost-after", "2"}, {}, "1:2");
  job.node[0]->send(SIGINT);
  const Result result = job.node[0]->finish();
  EXPECT_EQ(result.exit_code, 128 + SIGINT);
  EXPECT_THAT(result.err, HasSubstr("[run] the job got SIGINT on node "));
  Command leader(job.head_options);
  job.node[1]->wait_for(": it did not come back to the leader; the other 1 rank goes on\n");
  job.node[1]->wait_for("table 1 0 1 ");
  leader.send(SIGINT);
  EXPECT_EQ(job.node[1]->finish().exit_code, 128 + SIGINT);
  job.expect_nothing_left();
}

TEST(LeaderAgain, ANodeWhoseRanksAreDoneEndsWellWithoutOne) {
  Orphaned job({"--keep-going"}, {"--rejoin-timeout", "3"});
  for (const auto& each : job.node) ::kill(process_of(*each, "0 as . of 2"), SIGUSR2);
  for (const auto& each : job.node) {
    const Result result = each->finish();
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_THAT(result.err, HasSubstr("; all ranks here have ended with 0\n"));
  }
  job.expect_nothing_left();
}

TEST(LeaderAgain, OneThatEndsOnPurposeEndsTheJob) {
  const int port = free_port();
  Command leader(head(port, "2"));
  leader.wait_for("leads the job");
  Command first(node_of(port, "2")), second(node_of(port, "2"));
  for (Command* each : {&first, &second}) each->wait_for("began in generation 0");
  leader.send(SIGTERM);
  for (Command* each : {&first, &second}) {
    const Result result = each->finish();
    EXPECT_EQ(result.exit_code, 128 + SIGTERM);
    EXPECT_THAT(result.err, Not(HasSubstr("lost the leader")));
  }
}

TEST(LeaderAgain, NobodyAwaitsOneUnderHosts) {
  const Result result = serried({"run", "--hosts", "a:1,b:1", "--keep-going", "--rejoin-timeout", "5", "true"});
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_EQ(result.err.find("[run] --rejoin-timeout is given beside --hosts\n  fix: leave it out: under --hosts nobody "
                            "starts a lost leader again, so the job ends with it\n"),
            0u)
      << result.err;
}

}  // namespace
}  // namespace serried::testing
