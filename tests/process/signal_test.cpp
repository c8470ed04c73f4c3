// Ctrl-C, SIGTERM, kill -9: at any moment, and nothing is left.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <signal.h>

#include "tests/process/command.h"

namespace serried::testing {
namespace {

using ::testing::HasSubstr;

TEST(LaunchSignals, CtrlCReachesEveryRankOnceAndEndsTheJobWith130) {
  Command command(shell({"-n", "3"}, "trap 'echo got INT; exit 0' INT; echo ready; while :; do sleep 0.01; done"));
  command.wait_for("ready", 3);
  command.send(SIGINT);
  const Result result = command.finish();
  EXPECT_EQ(result.exit_code, 130);
  EXPECT_EQ(count_of(result.out, "got INT"), 3);
  EXPECT_THAT(result.err, HasSubstr("[run] the job got SIGINT; its 3 ranks are ended\n"));
  EXPECT_TRUE(command.nothing_left());
}

TEST(LaunchSignals, SigtermAndSighupAreForwarded) {
  for (const int signal : {SIGTERM, SIGHUP}) {
    Command command(shell({"-n", "2"},
                          "trap 'echo got TERM; exit 1' TERM; trap 'echo got HUP; exit 1' HUP\n"
                          "echo ready; while :; do sleep 0.01; done"));
    command.wait_for("ready", 2);
    command.send(signal);
    const Result result = command.finish();
    EXPECT_EQ(result.exit_code, 128 + signal);
    EXPECT_EQ(count_of(result.out, signal == SIGTERM ? "got TERM" : "got HUP"), 2) << result.out;
    EXPECT_TRUE(command.nothing_left());
  }
}

TEST(LaunchSignals, SecondCtrlCKillsAtOnce) {
  Command command(
      shell({"-n", "2", "--grace", "100"}, "trap 'echo no' INT TERM; echo ready; while :; do sleep 0.01; done"));
  command.wait_for("ready", 2);
  command.send(SIGINT);
  command.wait_for("no", 2);
  command.send(SIGINT);
  EXPECT_EQ(command.finish().exit_code, 130);
  EXPECT_TRUE(command.nothing_left());
}

TEST(LaunchSignals, RanksThatIgnoreCtrlCAreKilledAfterTheGrace) {
  Command command(shell({"-n", "2", "--grace", "0.3"}, "trap '' INT TERM; echo ready; while :; do sleep 1; done"));
  command.wait_for("ready", 2);
  command.send(SIGINT);
  const Result result = command.finish();
  EXPECT_EQ(result.exit_code, 130);
  EXPECT_LT(result.seconds, 5);
  EXPECT_TRUE(command.nothing_left());
}

TEST(LaunchSignals, CtrlCWorksAtAnyMoment) {
  for (int moment = 0; moment < 30; ++moment) {
    Command command(shell({"-n", "4", "--max-restarts", "100"}, "exit 1"));
    const timespec pause{.tv_sec = 0, .tv_nsec = moment * 1'000'000};  // a moment, not a synchronisation
    ::nanosleep(&pause, nullptr);
    command.send(SIGINT);
    EXPECT_EQ(command.finish().exit_code, 130) << "after " << moment << " ms";
    EXPECT_TRUE(command.nothing_left());
  }
}

TEST(LaunchSignals, CtrlCDuringAFailurePreventsTheRestart) {
  TemporaryFolder folder;
  const std::string fifo = make_fifo(folder);
  Command command(shell({"-n", "2", "--max-restarts", "5", "--grace", "100"},
                        "if [ $RANK = 1 ]; then read x < " + fifo +
                            "; exit 3; fi\n"
                            "trap 'echo ending' TERM; trap 'exit 0' INT; echo > " +
                            fifo +
                            "\n"
                            "while :; do sleep 0.01; done"));
  command.wait_for("ending");
  command.send(SIGINT);
  const Result result = command.finish();
  EXPECT_EQ(result.exit_code, 130);
  EXPECT_EQ(count_of(result.err, "restart"), 0) << result.err;
}

TEST(LaunchSignals, CtrlCWorksWhileTheReaderIsStuck) {
  Command command(shell({"-n", "2"}, "exec yes"));
  command.wait_for("y", 1000);  // from here on nobody reads, so everything fills up
  command.send(SIGINT);
  EXPECT_TRUE(command.ends_unread());
  EXPECT_EQ(command.finish().exit_code, 130);
  EXPECT_TRUE(command.nothing_left());
}

TEST(LaunchSignals, UserSignalsAreForwardedAndEndNothing) {
  Command command(shell({"-n", "2"}, "trap 'echo got USR1; exit 0' USR1; echo ready; while :; do sleep 0.01; done"));
  command.wait_for("ready", 2);
  command.send(SIGUSR1);
  const Result result = command.finish();
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(count_of(result.out, "got USR1"), 2);
}

TEST(LaunchSignals, KilledLauncherTakesItsRanksAlong) {
  Command command(shell({"-n", "3"}, "echo ready; exec sleep 100"));
  command.wait_for("ready", 3);
  EXPECT_GE(command.processes().size(), 4u);
  command.send(SIGKILL);
  EXPECT_EQ(command.finish().exit_code, 137);
  EXPECT_TRUE(command.nothing_left());
}

TEST(LaunchSignals, KilledLauncherTakesTheChildrenOfItsRanksAlong) {
  const std::string inner = SERRIED_BINARY " run sh -c 'setsid sleep 100 & echo ready; wait'";
  for (const std::string& script :
       {std::string("sleep 100 & echo ready; wait"), std::string("setsid sleep 100 & echo ready; wait"), inner}) {
    Command command(shell({"-n", "2"}, script));
    command.wait_for("ready", 2);
    command.send(SIGKILL);
    EXPECT_EQ(command.finish().exit_code, 137);
    EXPECT_TRUE(command.nothing_left()) << script;
  }
}

}  // namespace
}  // namespace serried::testing
