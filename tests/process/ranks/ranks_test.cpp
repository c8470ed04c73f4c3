// Real ranks under the real launcher: death, stop, restart, Ctrl-C, several jobs.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <signal.h>

#include <regex>
#include <set>

#include "tests/process/command.h"
#include "tests/process/shared_memory.h"

namespace serried::testing {
namespace {

using ::testing::HasSubstr;

std::vector<std::string> worker(std::vector<std::string> options, std::vector<std::string> arguments) {
  options.insert(options.begin(), "run");
  options.push_back(SERRIED_WORKER);
  options.insert(options.end(), arguments.begin(), arguments.end());
  return options;
}

class RanksThatDie : public ::testing::TestWithParam<const char*> {};

TEST_P(RanksThatDie, AreNamedByAllSurvivorsWithin200Milliseconds) {
  const TemporaryFolder folder;
  const std::set<std::string> before = shared_memory_files();
  const Result result = serried(worker({"-n", "3", "--grace", "10"}, {"die_in", GetParam(), folder.path() + "/note"}));
  EXPECT_EQ(result.exit_code, 128 + SIGKILL);
  // Who finds the death says so; who finds the group aborted by then names the same death.
  const std::regex raised("raised after (\\d+) ms: .*rank 1 \\(pid \\d+\\) died while rank [02] was in");
  int survivors = 0;
  for (std::sregex_iterator it(result.out.begin(), result.out.end(), raised), end; it != end; ++it) {
    EXPECT_LE(std::stoi((*it)[1]), 200) << result.out;
    ++survivors;
  }
  EXPECT_EQ(survivors, 2) << result.out << result.err;
  EXPECT_EQ(count_of(result.out, "later: "), 2) << result.out;
  EXPECT_EQ(count_of(result.out, "files: as before"), 2) << result.out;
  EXPECT_EQ(shared_memory_files(), before);
}

INSTANTIATE_TEST_SUITE_P(Shm, RanksThatDie,
                         ::testing::Values("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast",
                                           "barrier"),
                         [](const auto& info) { return std::string(info.param); });

TEST(Ranks, AStoppedRankIsReportedAsMissing) {
  const Result result = serried(worker({"-n", "3", "--grace", "0.5"}, {"stop"}));
  EXPECT_THAT(result.out, HasSubstr("timed out after"));
  EXPECT_THAT(result.out, HasSubstr("#2 all_reduce f32[512] sum"));
  EXPECT_THAT(result.out, HasSubstr("rank 1"));
  EXPECT_THAT(result.out, HasSubstr("#1 barrier"));
}

TEST(Ranks, AutoTakesSharedMemoryOnOneHost) {
  const Result result = serried(worker({"-n", "4"}, {"sum", "auto"}));
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(count_of(result.out, "sum 10 on shm"), 4) << result.out;
  EXPECT_EQ(result.err, "");
}

TEST(Ranks, GlooWorksUnderTheLauncher) {
  const Result result = serried(worker({"-n", "3"}, {"sum", "gloo"}));
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(count_of(result.out, "sum 6 on gloo"), 3) << result.out;
  EXPECT_EQ(result.err, "");
}

TEST(Ranks, TheStoreOutlivesItsUsers) {
  const Result result = serried(worker({"-n", "3"}, {"leave_early"}));
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(count_of(result.out, "still met"), 2) << result.out << result.err;
  EXPECT_EQ(result.err, "");
}

class WhenRank0Is : public ::testing::TestWithParam<const char*> {};

TEST_P(WhenRank0Is, TheOthersMakeGroupsOfThemselves) {
  const Result result = serried(worker({"-n", "3", "--grace", "10"}, {"lose_rank_0", GetParam()}));
  EXPECT_EQ(count_of(result.out, "lost: "), 2) << result.out << result.err;
  EXPECT_EQ(count_of(result.out, "sum of the rest 3"), 2) << result.out << result.err;
  EXPECT_LT(result.seconds, 8);
}

INSTANTIATE_TEST_SUITE_P(By, WhenRank0Is, ::testing::Values("kill", "stop"),
                         [](const auto& info) { return std::string(info.param); });

TEST(Ranks, OfSeveralLaunchersMeetInTheStoreOfNode0) {
  const std::string place = "127.0.0.1:" + std::to_string(free_port());
  const auto node = [&] { return worker({"--nnodes", "2", "--rendezvous", place, "-n", "2"}, {"sum", "gloo"}); };
  Command first(node());
  Command second(node());
  for (Command* command : {&first, &second}) {
    const Result result = command->finish();
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_EQ(count_of(result.out, "sum 10 on gloo"), 2) << result.out << result.err;
  }
}

TEST(Ranks, ProgramsOfARankThatFollowEachOtherMeetAnew) {
  const std::string once = std::string(SERRIED_WORKER) + " sum auto";
  const Result result = serried({"run", "-n", "2", "sh", "-c", once + " && " + once});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(count_of(result.out, "sum 3 on shm"), 4) << result.out << result.err;
}

TEST(Ranks, ThatWereStartedWithoutTheLaunchersFilesSaySo) {
  const Result result =
      serried({"run", "-n", "2", "bash", "-c",
               "eval \"exec $SERRIED_LAUNCHER_FD>&-\"; exec " + std::string(SERRIED_WORKER) + " sum auto"});
  EXPECT_NE(result.exit_code, 0);
  EXPECT_THAT(result.err + result.out, HasSubstr("and this process has no socket of that number"));
}

TEST(Ranks, ARestartedJobMeetsAnew) {
  const Result result = serried(worker({"-n", "3", "--max-restarts", "1"}, {"fail_once"}));
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(count_of(result.out, "sum 3"), 3) << result.out << result.err;
}

TEST(Ranks, CtrlCEndsTheJobAndLeavesNothing) {
  const std::set<std::string> before = shared_memory_files();
  Command command(worker({"-n", "4"}, {"run_for_ever"}));
  command.wait_for("running", 4);
  command.send(SIGINT);
  EXPECT_EQ(command.finish().exit_code, 130);
  EXPECT_TRUE(command.nothing_left());
  EXPECT_EQ(shared_memory_files(), before);
}

TEST(Ranks, TwoJobsAtOnceDoNotMix) {
  Command first(worker({"-n", "2"}, {"sum", "auto"}));
  Command second(worker({"-n", "3"}, {"sum", "auto"}));
  EXPECT_EQ(count_of(first.finish().out, "sum 3 on shm"), 2);
  EXPECT_EQ(count_of(second.finish().out, "sum 6 on shm"), 3);
}

TEST(Ranks, TracesAreWrittenAtExit) {
  const TemporaryFolder folder;
  const Result result = serried(worker({"-n", "2"}, {"trace"}), {"SERRIED_TRACE=" + folder.path()});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  for (const char* rank : {"0", "1"}) {
    const std::string text = read_file(folder.path() + "/rank_" + rank + ".json");
    EXPECT_THAT(text, HasSubstr("\"step\""));
    EXPECT_THAT(text, HasSubstr("\"barrier\""));
  }
}

}  // namespace
}  // namespace serried::testing
