// `serried run --keep-going`: ranks that live on when others are lost, newcomers, and jobs that cannot do it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <signal.h>

#include <regex>

#include "tests/process/command.h"

namespace serried::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

std::vector<std::string> kept_job(std::vector<std::string> options, const std::string& argument = "") {
  options.insert(options.begin(), {"run", "--keep-going"});
  options.push_back(SERRIED_ELASTIC_RANK);
  if (!argument.empty()) options.push_back(argument);
  return options;
}

std::vector<std::string> kept_node(int port, std::vector<std::string> options) {
  options.insert(options.begin(), {"--rendezvous", "127.0.0.1:" + std::to_string(port), "--last-call", "0.2"});
  return kept_job(std::move(options));
}

// A rank that has said where it began: "[rank 1] pid 17 began in generation 0 as 1 of 3".
pid_t pid_in(const std::string& out, const std::string& as) {
  std::smatch match;
  const std::regex began("pid (\\d+) began in generation " + as);
  EXPECT_TRUE(std::regex_search(out, match, began)) << "no rank began in generation " << as << " in:\n" << out;
  return match.empty() ? 0 : std::stoi(match[1]);
}

TEST(KeepGoing, TheOthersGetTheNextTableAndARankInThePlaceOfTheLost) {
  Command command(kept_job({"-n", "3", "--max-restarts", "1"}));
  command.wait_for("began in generation 0", 3);
  const std::string out = command.so_far();
  ::kill(pid_in(out, "0 as 0 of 3"), SIGKILL);
  command.wait_for("table 1 ", 2);
  command.wait_for("began in generation 1 as 2 of 3, count 1");
  const std::string later = command.so_far();
  const std::string one = std::to_string(pid_in(out, "0 as 1 of 3")), two = std::to_string(pid_in(out, "0 as 2 of 3"));
  for (const std::string& pid : {one, two}) {
    EXPECT_THAT(later, HasSubstr("(SIGKILL) for " + pid)) << later;
  }
  EXPECT_THAT(later, HasSubstr("table 1 0 3 0 3 0 1 for " + one));
  EXPECT_THAT(later, HasSubstr("table 1 1 3 1 3 0 1 for " + two));
  // Another one, with no restart left.
  ::kill(std::stoi(two), SIGSEGV);
  command.wait_for("table 2 ", 2);
  EXPECT_THAT(command.so_far(), HasSubstr("table 2 1 2 1 2 0 1 for " + std::to_string(pid_in(later, "1 as 2 of 3"))));
  for (const pid_t pid : {std::stoi(one), pid_in(later, "1 as 2 of 3")}) ::kill(pid, SIGUSR2);
  const Result result = command.finish();
  EXPECT_EQ(result.exit_code, 0) << result.out << result.err;
  EXPECT_THAT(result.err, HasSubstr("[run] rank 0 of 3 (pid "));
  EXPECT_THAT(result.err, HasSubstr("  the other 2 ranks go on, and it is started again\n"));
  EXPECT_THAT(result.err, HasSubstr("[run] rank 1 of 3 (pid "));
  EXPECT_THAT(result.err, HasSubstr("  the other 2 ranks go on\n"));
  EXPECT_TRUE(command.nothing_left());
}

TEST(KeepGoing, ARankThatUsesNoElasticIsKeptByNobodyAndNamed) {
  Command command(kept_job({"-n", "2"}, "silent"));
  command.wait_for("began in generation 0", 2);
  ::kill(pid_in(command.so_far(), "0 as 1 of 2"), SIGKILL);
  const Result result = command.finish();
  EXPECT_EQ(result.exit_code, 128 + SIGKILL);
  EXPECT_THAT(result.err,
              HasSubstr("  --keep-going keeps nobody: rank 0 has not made a serried::Elastic by now, so all "
                        "ranks are ended\n"));
  EXPECT_THAT(result.out, Not(HasSubstr("table")));
}

TEST(KeepGoing, WhenTheLastRankIsLostTheJobEndsWithItsCode) {
  Command command(kept_job({"-n", "2"}));
  command.wait_for("began in generation 0", 2);
  const std::string out = command.so_far();
  ::kill(pid_in(out, "0 as 1 of 2"), SIGKILL);
  command.wait_for("table 1 0 1 0 1 0 1 for ");
  ::kill(pid_in(out, "0 as 0 of 2"), SIGTERM);
  EXPECT_EQ(command.finish().exit_code, 128 + SIGTERM);
  EXPECT_TRUE(command.nothing_left());
}

TEST(KeepGoing, CtrlCEndsAllThatIsThere) {
  Command command(kept_job({"-n", "2", "--max-restarts", "3"}));
  command.wait_for("began in generation 0", 2);
  ::kill(pid_in(command.so_far(), "0 as 0 of 2"), SIGKILL);
  command.wait_for("began in generation 1");
  command.send(SIGINT);
  EXPECT_EQ(command.finish().exit_code, 128 + SIGINT);
  EXPECT_TRUE(command.nothing_left());
}

TEST(KeepGoing, NodesJoinAndAreLostWhileTheRanksLiveOn) {
  const int port = free_port();
  Command first(kept_node(port, {"--nnodes", "1:3", "-n", "2"}));
  first.wait_for("began in generation 0", 2);
  Command second(kept_node(port, {"--nnodes", "1:3", "-n", "1"}));
  second.wait_for("began in generation 1 as 2 of 3");
  first.wait_for("table 1 1 3 1 2 0 2 for ");
  EXPECT_THAT(first.so_far(), Not(HasSubstr("over ")));
  second.send(SIGKILL);
  first.wait_for("table 2 0 2 0 2 0 1 for ");
  EXPECT_THAT(first.so_far(), HasSubstr("over 1 lost the launcher of node 1"));
  for (const char* as : {"0 as 0 of 2", "0 as 1 of 2"}) ::kill(pid_in(first.so_far(), as), SIGUSR2);
  const Result result = first.finish();
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.err, HasSubstr("[run] the job grows by "));
  EXPECT_THAT(result.err, HasSubstr("; the other 2 ranks go on\n"));
}

TEST(KeepGoing, TooFewNodesWaitWithTheirStateAndThenSaySo) {
  const int port = free_port();
  Command first(kept_node(port, {"--nnodes", "2", "--node-rank", "0", "-n", "1", "--join-timeout", "4"}));
  Command second(kept_node(port, {"--nnodes", "2", "--node-rank", "1", "-n", "1"}));
  second.wait_for("began in generation 0");
  first.wait_for("began in generation 0");
  second.send(SIGKILL);
  first.wait_for("; the other 1 rank waits for more nodes");
  Command third(kept_node(port, {"--nnodes", "2", "--node-rank", "1", "-n", "1"}));
  third.wait_for("began in generation 1");
  first.wait_for("table 1 0 2 0 1 0 2 for ");
  third.send(SIGKILL);
  const Result result = first.finish();
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.err,
              HasSubstr("[run] 1 of at least 2 nodes are left, and no other joined within 4 s\n  fix: start a "
                        "launcher on another node"));
}

TEST(KeepGoing, ANodeWithoutRanksStaysToTheEnd) {
  const int port = free_port();
  Command first(kept_node(port, {"--nnodes", "2", "--node-rank", "0", "-n", "2"}));
  Command second(kept_node(port, {"--nnodes", "2", "--node-rank", "1", "-n", "1"}));
  second.wait_for("began in generation 0 as 2 of 3");
  first.wait_for("began in generation 0", 2);
  ::kill(pid_in(second.so_far(), "0 as 2 of 3"), SIGKILL);
  first.wait_for("table 1 1 2 1 2 0 1 for ");
  for (const char* as : {"0 as 0 of 3", "0 as 1 of 3"}) ::kill(pid_in(first.so_far(), as), SIGUSR2);
  EXPECT_EQ(first.finish().exit_code, 0);
  EXPECT_EQ(second.finish().exit_code, 0);
}

TEST(KeepGoing, OptionsItCannotGoWithAreRefused) {
  const Result alone = serried(kept_job({"-n", "1"}));
  EXPECT_EQ(alone.exit_code, 2);
  EXPECT_THAT(alone.err,
              HasSubstr("[run] --keep-going with one rank: nobody is left when it is lost\n  fix: pass -n 2"));
  const Result port = serried(kept_job({"-n", "2", "--master-port", "29500"}));
  EXPECT_EQ(port.exit_code, 2);
  EXPECT_THAT(port.err, HasSubstr("[run] --keep-going and --master-port do not go together"));
}

}  // namespace
}  // namespace serried::testing
