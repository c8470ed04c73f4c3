// What the launcher says while real ranks wait for each other.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <signal.h>

#include <functional>
#include <regex>

#include "tests/process/command.h"

namespace serried::testing {
namespace {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

std::vector<std::string> job(int num_ranks, const std::string& slow_after, std::vector<std::string> arguments) {
  std::vector<std::string> words = {
      "run", "-n", std::to_string(num_ranks), "--slow-after", slow_after, "--grace", "1", SERRIED_WORKER};
  words.insert(words.end(), arguments.begin(), arguments.end());
  return words;
}

std::string end(Command& running) {
  running.send(SIGTERM);
  const std::string err = running.finish().err;
  EXPECT_TRUE(running.nothing_left());
  return err;
}

class WaitingLines : public ::testing::TestWithParam<const char*> {};

TEST_P(WaitingLines, NameTheRankThatDoesNotCome) {
  Command running(job(4, "0.3", {"leave_out", GetParam(), "2"}));
  running.wait_for(" has not come to #2 all_reduce f32[512] sum");
  EXPECT_THAT(end(running),
              ContainsRegex("\\[run\\] group " + std::string(GetParam()) +
                            "/1: rank 2 has not come to #2 all_reduce f32\\[512\\] sum; 3 ranks wait since "
                            "0\\.[3-9] s; rank 2 left #1 [0-9]+\\.[0-9] s ago and (sleeps \\(S\\)|runs \\(R\\))\n"));
}

INSTANTIATE_TEST_SUITE_P(Seeing, WaitingLines, ::testing::Values("shm", "gloo"),
                         [](const auto& info) { return std::string(info.param); });

TEST(Seeing, SaysWhoIsStoppedAndWhenItIsOver) {
  Command running({"run", "-n", "3", "--slow-after", "0.3", "--grace", "1", "sh", "-c",
                   "[ $RANK = 1 ] && echo pid of rank 1: $$; exec " SERRIED_WORKER " run_for_ever"});
  running.wait_for("running", 3);
  const std::string so_far = running.so_far();
  std::smatch match;
  ASSERT_TRUE(std::regex_search(so_far, match, std::regex("pid of rank 1: ([0-9]+)")));
  const pid_t stopped = std::stoi(match[1]);
  ::kill(stopped, SIGSTOP);
  running.wait_for(" is stopped (T)");
  ::kill(stopped, SIGCONT);
  running.wait_for(" went on after ");
  const std::string err = end(running);
  EXPECT_THAT(err, HasSubstr("[run] group auto/1: "));
  EXPECT_THAT(err, HasSubstr("; rank 1 "));
}

TEST(Seeing, SaysWhoWaitsForAMessage) {
  Command running(job(2, "0.3", {"receive", "shm"}));
  running.wait_for(" waits in recv f32[3] from rank 1 since ");
  EXPECT_THAT(end(running), HasSubstr("; rank 1 has made no call there and "));
}

TEST(Seeing, RepeatsEverMoreSeldom) {
  Command running(job(2, "0.3", {"leave_out", "shm", "1"}));
  running.wait_for(" has not come to ", 4);
  const std::string err = end(running);
  const std::regex line(" has not come to .*; rank 0 waits since ([0-9.]+) s;");
  std::vector<double> seconds;
  for (std::sregex_iterator match(err.begin(), err.end(), line), none; match != none; ++match) {
    seconds.push_back(std::stod((*match)[1]));
  }
  ASSERT_GE(seconds.size(), 4U);
  for (size_t i = 1; i < seconds.size(); ++i) EXPECT_GE(seconds[i], 2 * seconds[i - 1] - 0.2) << i;  // both are rounded
}

TEST(Seeing, SaysNothingWhereItIsToldToBeSilent) {
  const Result result = serried(job(3, "0", {"stop"}));
  EXPECT_THAT(result.out + result.err, HasSubstr(" ms in #2 all_reduce f32[512] sum: rank 1 is at #1 barrier"));
  EXPECT_THAT(result.err, Not(HasSubstr("has not come to")));
}

std::string page_of(const std::string& folder) {
  const Result shown = serried({"debug", "show", folder});
  EXPECT_EQ(shown.exit_code, 0) << shown.err;
  return shown.out;
}

TEST(Seeing, AFailedJobLeavesWhatItsRanksCalled) {
  const TemporaryFolder folder;
  const Result result = serried({"run", "-n", "3", "--log-dir", folder.path(), SERRIED_WORKER, "fail_once"});
  EXPECT_EQ(result.exit_code, 5);
  const std::string page = page_of(folder.path() + "/dump");
  EXPECT_THAT(page, ContainsRegex("job [0-9a-f]+, attempt 0: 3 ranks, a dump by serried "));
  EXPECT_THAT(page, HasSubstr("made because rank 2 of 3 (pid "));
  EXPECT_THAT(page, HasSubstr("\ngroup auto/1: ranks 0-2\n"));
  EXPECT_THAT(page, HasSubstr("#1 barrier: ranks 0-2 done\n"));
  EXPECT_THAT(page, ContainsRegex("rank 2 \\(pid [0-9]+\\) has ended, 1 call\n"));
}

TEST(Seeing, AHungJobIsWrittenDownByHand) {
  const TemporaryFolder folder;
  Command running(job(3, "0.2", {"leave_out", "gloo", "1"}));
  running.wait_for(" has not come to #2 all_reduce f32[512] sum");
  const Result dumped =
      serried({"debug", "dump", std::to_string(running.pid()), "-o", folder.path(), "--stacks-within", "0"});
  EXPECT_EQ(dumped.exit_code, 0) << dumped.err;
  EXPECT_THAT(dumped.out, HasSubstr("written: " + folder.path() + "/"));
  const std::string page = page_of(folder.path());
  EXPECT_THAT(page, HasSubstr("\ngroup gloo/1: ranks 0-2\n  rank 1 has not come to #2\n"));
  EXPECT_THAT(page, HasSubstr("#1 barrier: ranks 0-2 done\n"));
  EXPECT_THAT(page, ContainsRegex("  > #2 rank 1 not come \\| all_reduce f32\\[512\\] sum: ranks 0, 2 in it for "));
  end(running);
}

TEST(Seeing, WhatRanksThatAreThreadsCallIsTold) {
  Command running(job(1, "0.3", {"leave_out_a_thread"}));
  running.wait_for(": rank 2 has not come to #1 barrier; 2 ranks wait since ");
  end(running);
}

}  // namespace
}  // namespace serried::testing
