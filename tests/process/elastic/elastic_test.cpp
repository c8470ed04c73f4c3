// Ranks that are processes are killed where they say, and the others go on under serried run --keep-going.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <cstdlib>
#include <memory>

#include "tests/process/command.h"
#include "tests/process/shared_memory.h"

namespace serried::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

Result trained(std::vector<std::string> options, std::vector<std::string> arguments) {
  std::vector<std::string> words = {"run", "--keep-going"};
  words.insert(words.end(), options.begin(), options.end());
  words.push_back(SERRIED_ELASTIC_WORKER);
  words.insert(words.end(), arguments.begin(), arguments.end());
  Result result = serried(words);
  EXPECT_EQ(result.exit_code, 0) << result.out << result.err;
  EXPECT_EQ(count_of(result.out, "DIFFERS"), 0) << result.out;
  return result;
}

TEST(ElasticRanks, WithoutADeathAllTrain) {
  const Result result = trained({"-n", "3"}, {"5", "3"});
  EXPECT_EQ(count_of(result.out, "equals the plain loop after 3 3 3 3 3 ;"), 3) << result.out << result.err;
}

TEST(ElasticRanks, ThoseLeftGoOnWithTheStep) {
  for (const char* death : {"2:1:forward:0", "2:0:bucket:0", "2:2:bucket:2", "2:1:commit:0"}) {
    const Result result = trained({"-n", "3"}, {"5", "1", death});
    EXPECT_EQ(count_of(result.out, "equals the plain loop after 3 3 2 2 2 ;"), 2) << death << result.out << result.err;
  }
}

TEST(ElasticRanks, BehindCommitTheStepCounts) {
  for (const char* death : {"2:1:before_optimizer:0", "2:0:behind_optimizer:0"}) {
    const Result result = trained({"-n", "3"}, {"5", "1", death});
    EXPECT_EQ(count_of(result.out, "equals the plain loop after 3 3 3 2 2 ;"), 2) << death << result.out << result.err;
  }
}

TEST(ElasticRanks, ALostRankIsStartedAgainAndTakesTheState) {
  const Result result = trained({"-n", "3", "--max-restarts", "1"}, {"6", "3", "3:1:bucket:1"});
  EXPECT_EQ(count_of(result.out, "equals the plain loop after 3 3 3 3 3 3 ;"), 3) << result.out << result.err;
}

TEST(ElasticRanks, TheSourceOfAStateDies) {
  const Result result = trained({"-n", "4", "--max-restarts", "2"}, {"6", "3", "2:3:bucket:1", "2:0:transfer:0"});
  EXPECT_GE(count_of(result.out, "equals the plain loop after"), 3) << result.out << result.err;
}

TEST(ElasticRanks, TwoDieInOneStep) {
  const Result result = trained({"-n", "4"}, {"5", "1", "2:1:forward:0", "2:3:bucket:2"});
  EXPECT_EQ(count_of(result.out, "equals the plain loop after 4 4 2 2 2 ;"), 2) << result.out << result.err;
}

/// The newest step that rank 0 says to have done.
int newest_step(const Command& node) {
  const std::string& out = node.so_far();
  const size_t at = out.rfind("done ");
  return at == out.npos ? 0 : std::atoi(out.c_str() + at + 5);
}

/// A rank of the worker that `node` has started.
pid_t any_rank(const Command& node) {
  for (const pid_t pid : node.processes()) {
    if (read_file("/proc/" + std::to_string(pid) + "/cmdline").starts_with(SERRIED_ELASTIC_WORKER)) return pid;
  }
  ADD_FAILURE() << "no rank lives";
  return 0;
}

// Of steps there are as many as it takes: they end with a file.
TEST(ElasticRanks, TheyStepOnWithoutALeaderAndAreLedByTheNext) {
  const std::set<std::string> before = shared_memory_files();
  const TemporaryFolder folder;
  const std::string address = "127.0.0.1:" + std::to_string(free_port());
  const std::vector<std::string> head = {"rendezvous", "--listen",     address,          "--nnodes",
                                         "2",          "--keep-going", "--max-restarts", "1"};
  auto leader = std::make_unique<Command>(head);
  leader->wait_for("leads the job");
  const auto start = [&](const std::string& node_rank) {
    return std::make_unique<Command>(
        std::vector<std::string>{"run", "--nnodes", "2", "--rendezvous", address, "-n", "2",
                                 node_rank.empty() ? "--last-call" : "--node-rank", node_rank.empty() ? "3" : node_rank,
                                 SERRIED_ELASTIC_WORKER, "1000000", "1", "until:" + folder.path() + "/end"});
  };
  const auto first = start(""), second = start("1");
  const auto wait_for_steps = [&] { first->wait_for("done " + std::to_string(newest_step(*first) + 20) + "\n"); };
  wait_for_steps();
  leader->send(SIGKILL);
  for (const auto& each : {&first, &second})
    (*each)->wait_for("[run] lost the leader (127.0.0.1); the ranks here go on");
  wait_for_steps();
  EXPECT_THAT(first->so_far(), Not(HasSubstr("equals")));
  leader = std::make_unique<Command>(head);
  leader->wait_for("[run] a leader is at its place again: 4 ranks\n");
  wait_for_steps();
  ::kill(any_rank(*second), SIGKILL);
  second->wait_for("the other 3 ranks go on, and it is started again");
  first->wait_for("the other 3 ranks go on, and it is started again");
  wait_for_steps();
  write_file(folder.path() + "/end", "");
  for (const auto& each : {&first, &second}) {
    const Result result = (*each)->finish();
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_EQ(count_of(result.out, "equals the plain loop after 4 4 4 "), 2) << result.err;
    EXPECT_EQ(count_of(result.out, "DIFFERS"), 0);
    EXPECT_TRUE((*each)->nothing_left());
  }
  EXPECT_EQ(leader->finish().exit_code, 0);
  EXPECT_EQ(shared_memory_files(), before);
}

TEST(ElasticRanks, WithoutKeepGoingALossEndsTheJob) {
  const Result result = serried({"run", "-n", "2", SERRIED_ELASTIC_WORKER, "5", "1", "2:1:forward:0"});
  EXPECT_EQ(result.exit_code, 137) << result.err;
  EXPECT_THAT(result.err, HasSubstr("killed by signal 9"));
}

}  // namespace
}  // namespace serried::testing
