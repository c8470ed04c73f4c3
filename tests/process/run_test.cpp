// `serried run` on one node, through the real binary.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <signal.h>

#include "tests/process/command.h"

namespace serried::testing {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::UnorderedElementsAre;

TEST(LaunchRun, EveryRankKnowsItsPlace) {
  const Result result = serried(shell({"-n", "3"},
                                      "echo $RANK/$WORLD_SIZE local $LOCAL_RANK/$LOCAL_WORLD_SIZE node "
                                      "$GROUP_RANK $MASTER_ADDR restarts $TORCHELASTIC_RESTART_COUNT"));
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(result.err, "");
  EXPECT_THAT(lines_of(result.out), UnorderedElementsAre("[rank 0] 0/3 local 0/3 node 0 127.0.0.1 restarts 0",
                                                         "[rank 1] 1/3 local 1/3 node 0 127.0.0.1 restarts 0",
                                                         "[rank 2] 2/3 local 2/3 node 0 127.0.0.1 restarts 0"));
}

TEST(LaunchRun, RankZeroAloneInheritsTheListeningSocketOfTheMasterPort) {
  // The kernel's table of sockets tells whether the inherited one listens (state 0A) on MASTER_PORT.
  const Result result = serried(shell({"-n", "2"}, R"sh(
    fd=$SERRIED_MASTER_LISTEN_FD
    if [ $RANK = 1 ]; then echo "fd='$fd' sockets=$(ls -l /proc/$$/fd | grep -c socket)"; exit; fi
    inode=$(readlink /proc/$$/fd/$fd | tr -dc 0-9)
    hex=$(printf ':%04X' $MASTER_PORT)
    grep -q "0100007F$hex .* 0A .* $inode " /proc/net/tcp && echo listening)sh"));
  // Its line to the launcher is one.
  EXPECT_THAT(lines_of(result.out), UnorderedElementsAre("[rank 0] listening", "[rank 1] fd='' sockets=1"));
}

TEST(LaunchRun, EveryRankHasALineToTheLauncherAndNoOtherRanks) {
  const Result result = serried(shell({"-n", "2", "--master-port", std::to_string(free_port())}, R"sh(
    grep -c "$(readlink /proc/$$/fd/$SERRIED_LAUNCHER_FD | tr -dc 0-9)" /proc/net/unix
    ls -l /proc/$$/fd | grep -c socket)sh"));
  EXPECT_THAT(lines_of(result.out), UnorderedElementsAre("[rank 0] 1", "[rank 0] 1", "[rank 1] 1", "[rank 1] 1"));
}

TEST(LaunchRun, EachJobHasASecretOfItsOwn) {
  const auto secrets = [] {
    const Result result = serried(shell({"-n", "2"}, "echo $SERRIED_JOB_SECRET; tr '\\0' ' ' < /proc/$PPID/cmdline"));
    const std::string secret = result.out.substr(9, 64);
    EXPECT_EQ(secret.find_first_not_of("0123456789abcdef"), std::string::npos) << result.out;
    EXPECT_EQ(count_of(result.out, secret), 2) << result.out;  // in two environments and on no command line
    return secret;
  };
  EXPECT_NE(secrets(), secrets());
}

TEST(LaunchRun, MasterPortLeavesThePortToRankZero) {
  const std::string port = std::to_string(free_port());
  const Result result = serried(shell({"--master-port", port}, "echo port $MASTER_PORT fd=$SERRIED_MASTER_LISTEN_FD."));
  EXPECT_EQ(result.out, "[rank 0] port " + port + " fd=.\n");
}

TEST(LaunchRun, ArgumentsReachTheProgramUnchanged) {
  const Result result =
      serried({"run", "-n", "1", "printf", "<%s>", "--steps", "100", "-n", "7", "--", "a b", "", "--help"});
  EXPECT_EQ(result.out, "[rank 0] <--steps><100><-n><7><--><a b><><--help>\n");
}

TEST(LaunchRun, RanksReadNothingFromStdin) {
  EXPECT_EQ(serried(shell({}, "cat; readlink /proc/$$/fd/0")).out, "[rank 0] /dev/null\n");
}

TEST(LaunchRun, LongLinesOfManyRanksNeverMix) {
  // 4 ranks x 300 lines of 9,000 bytes, more than a pipe takes at once, each of one letter.
  const Result result = serried(shell({"-n", "4"}, R"sh(
    letter=$(printf %s ABCD | cut -c $((RANK + 1)))
    line=$(head -c 9000 /dev/zero | tr '\0' $letter)
    i=0; while [ $i -lt 300 ]; do echo $line; i=$((i + 1)); done)sh"));
  const std::vector<std::string> lines = lines_of(result.out);
  ASSERT_EQ(lines.size(), 1200u);
  std::vector<int> counts(4);
  for (const std::string& line : lines) {
    const int rank = line.at(6) - '0';
    ASSERT_EQ(line, "[rank " + std::to_string(rank) + "] " + std::string(9000, static_cast<char>('A' + rank)));
    ++counts[static_cast<size_t>(rank)];
  }
  EXPECT_THAT(counts, Each(300));
}

TEST(LaunchRun, LastLineWithoutNewlineIsShown) {
  const Result result = serried(shell({}, "printf out; printf err >&2"));
  EXPECT_EQ(result.out, "[rank 0] out\n");
  EXPECT_EQ(result.err, "[rank 0] err\n");
}

TEST(LaunchRun, ThereIsNoColourInAPipe) {
  EXPECT_THAT(serried(shell({"-n", "2"}, "echo x")).out, Not(HasSubstr("\033")));
}

TEST(LaunchRun, TerminalGetsColouredPrefixesUnlessRefused) {
  // script(1) gives the launcher a terminal of its own.
  const std::string inner = std::string(SERRIED_BINARY) + " run -n 1 echo x";
  const std::string outer = "script -qec '" + inner + "' /dev/null";
  EXPECT_THAT(serried(shell({}, "unset NO_COLOR; TERM=xterm " + outer)).out, HasSubstr("\033[36m[rank 0] \033[0mx"));
  EXPECT_THAT(serried(shell({}, "NO_COLOR=1 TERM=xterm " + outer)).out, Not(HasSubstr("\033[36m")));
}

TEST(LaunchRun, CulpritIsNamedWithItsLastLinesAndItsCode) {
  const Result result = serried(shell({"-n", "3"}, R"sh(
    if [ $RANK != 1 ]; then exec sleep 100; fi
    i=1; while [ $i -le 30 ]; do echo line $i >&2; i=$((i + 1)); done
    printf 'no newline' >&2; exit 7)sh"));
  EXPECT_EQ(result.exit_code, 7);
  EXPECT_LT(result.seconds, 4);
  EXPECT_THAT(result.err, ContainsRegex("\\[run\\] rank 1 of 3 \\(pid [0-9]+\\) exited with code 7\n"
                                        "  its last lines of stderr:\n    line 12\n    line 13\n"));
  EXPECT_THAT(result.err, HasSubstr("    line 30\n    no newline\n  fix: "));
  EXPECT_THAT(result.err, Not(HasSubstr("    line 11\n")));
}

TEST(LaunchRun, CulpritKilledByASignalGives128PlusSignal) {
  const Result result = serried(shell({"-n", "2"}, "[ $RANK = 0 ] && exec sleep 100; kill -9 $$"));
  EXPECT_EQ(result.exit_code, 137);
  EXPECT_THAT(result.err,
              ContainsRegex("rank 1 of 2 \\(pid [0-9]+\\) was killed by signal 9 \\(SIGKILL\\)\n  fix: if nobody "
                            "killed it, memory ran out"));
}

// Shell code that waits until process $pid is in a state of /proc, as Z for ended.
std::string wait_for_state(const std::string& state) {
  return "; until grep -q '^State:.*" + state + "' /proc/$pid/status; do sleep 0.01; done; ";
}

// Rank 0 ends first, with the words of an error of its group; rank 1, whose fault it is, ends when that has been seen.
TEST(LaunchRun, ARankThatOnlySuffersIsNotTheCulprit) {
  for (const std::string words : {"[all_reduce] the group is unusable since: rank 1 called abort()",
                                  "[barrier] rank 1 has left the group while rank 0 was in #3 barrier",
                                  "[barrier] rank 1 (pid 7) died while rank 0 was in #3 barrier"}) {
    TemporaryFolder folder;
    const std::string fifo = make_fifo(folder);
    const Result result = serried(shell({"-n", "2"}, "if [ $RANK = 0 ]; then echo $$ > " + fifo + "; echo '" + words +
                                                         "' >&2; exit 1; fi\n" + "read pid < " + fifo +
                                                         wait_for_state("Z") + "echo out of disk >&2; exit 9"));
    EXPECT_EQ(result.exit_code, 9) << result.err;
    EXPECT_THAT(result.err, ContainsRegex("\\[run\\] rank 1 of 2 \\(pid [0-9]+\\) exited with code 9\n"
                                          "  its last lines of stderr:\n    out of disk\n"));
  }
}

TEST(LaunchRun, RanksThatEndedBeforeAreNamedBesideOneThatOnlySuffers) {
  TemporaryFolder folder;
  const std::string fifo = make_fifo(folder);
  const Result result =
      serried(shell({"-n", "2"}, "if [ $RANK = 1 ]; then echo $$ > " + fifo + "; exit 0; fi\n" + "read pid < " + fifo +
                                     wait_for_state("Z") + "echo 'rank 1 has left the group while' >&2; exit 3"));
  EXPECT_EQ(result.exit_code, 3) << result.err;
  EXPECT_THAT(result.err,
              HasSubstr("    rank 1 has left the group while\n  before that rank 1 had ended with code 0\n  fix: see "
                        "whether all ranks make the same calls and end together; --log-dir keeps all output\n"));
}

TEST(LaunchRun, ARankThatSuffersAloneIsQuoted) {
  const Result result = serried(shell({"-n", "2"}, R"sh(
    if [ $RANK = 1 ]; then exec sleep 100; fi
    echo 'the group is unusable since: rank 1 called abort()' >&2; exit 3)sh"));
  EXPECT_EQ(result.exit_code, 3);
  EXPECT_THAT(result.err, HasSubstr("[run] rank 0 of 2 "));
}

TEST(LaunchRun, RankThatExitsEarlyWithZeroEndsNothing) {
  TemporaryFolder folder;
  const std::string fifo = make_fifo(folder);
  const Result result = serried(shell({"-n", "2"}, "if [ $RANK = 0 ]; then echo $$ > " + fifo + "; exit 0; fi\n" +
                                                       "read pid < " + fifo + wait_for_state("Z") + "echo done"));
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.out, "[rank 1] done\n");
}

TEST(LaunchRun, RankThatIgnoresSigtermIsKilledAfterTheGrace) {
  TemporaryFolder folder;
  const std::string fifo = make_fifo(folder);
  const Result result = serried(shell({"-n", "2", "--grace", "0.4"}, "if [ $RANK = 1 ]; then read x < " + fifo +
                                                                         "; exit 5; fi\n"
                                                                         "trap '' TERM; echo > " +
                                                                         fifo + "; while :; do sleep 1; done"));
  EXPECT_EQ(result.exit_code, 5);
  EXPECT_THAT(result.err, HasSubstr("[run] not all ranks ended within 0.4 s: killing them\n"));
  EXPECT_LT(result.seconds, 5);
}

TEST(LaunchRun, StoppedRankIsEndedToo) {
  TemporaryFolder folder;
  const std::string fifo = make_fifo(folder);
  const Result result = serried(shell({"-n", "2", "--grace", "100"}, "if [ $RANK = 0 ]; then echo $$ > " + fifo +
                                                                         "; kill -STOP $$; fi\n" + "read pid < " +
                                                                         fifo + wait_for_state("T") + "exit 4"));
  EXPECT_EQ(result.exit_code, 4);
}

TEST(LaunchRun, ChildrenOfRanksAreEndedToo) {
  const Result result = serried(shell({"-n", "2"}, "sleep 100 & [ $RANK = 1 ] && exit 6; wait"));
  EXPECT_EQ(result.exit_code, 6);
  EXPECT_EQ(serried(shell({"-n", "2"}, "sleep 100 & exit 0")).exit_code, 0);
}

TEST(LaunchRun, WholeSetIsRestartedWithANewPortAndACount) {
  TemporaryFolder folder;
  const std::string fifo = make_fifo(folder);
  const Result result = serried(shell({"-n", "2", "--max-restarts", "2"},
                                      "echo attempt $TORCHELASTIC_RESTART_COUNT/$TORCHELASTIC_MAX_RESTARTS\n"
                                      "[ $RANK = 0 ] && echo $MASTER_PORT >> " +
                                          folder.path() +
                                          "/ports\n"
                                          "[ $TORCHELASTIC_RESTART_COUNT = 2 ] && exit 0\n"
                                          "if [ $RANK = 1 ]; then read x < " +
                                          fifo + "; exit 9; fi; echo > " + fifo + "; exec sleep 100"));
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(count_of(result.out, "[rank 0] attempt "), 3);
  EXPECT_EQ(count_of(result.out, "[rank 1] attempt "), 3);
  EXPECT_THAT(result.out, HasSubstr("[rank 1] attempt 2/2\n"));
  EXPECT_THAT(result.err, HasSubstr("[run] restart 2 of 2: all ranks start again\n"));
  EXPECT_EQ(count_of(result.err, "exited with code 9"), 2);
  EXPECT_EQ(lines_of(read_file(folder.path() + "/ports")).size(), 3u);
}

TEST(LaunchRun, LastFailureCountsWhenRestartsAreUsedUp) {
  const Result result = serried(shell({"--max-restarts", "1"}, "exit $((10 + TORCHELASTIC_RESTART_COUNT))"));
  EXPECT_EQ(result.exit_code, 11);
}

TEST(LaunchRun, LogFolderHoldsTheRawOutputOfEachAttempt) {
  TemporaryFolder folder;
  const std::string logs = folder.path() + "/a/b";
  const Result result =
      serried(shell({"-n", "2", "--max-restarts", "1", "--log-dir", logs},
                    "echo out $RANK; printf 'err %s' $RANK >&2; [ $RANK$TORCHELASTIC_RESTART_COUNT != 10 ]"));
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(read_file(logs + "/attempt_0/rank_1.out"), "out 1\n");
  EXPECT_EQ(read_file(logs + "/attempt_0/rank_1.err"), "err 1");
  EXPECT_EQ(read_file(logs + "/attempt_1/rank_0.out"), "out 0\n");
  EXPECT_EQ(read_file(logs + "/attempt_1/rank_1.err"), "err 1");
}

TEST(LaunchRun, LogFolderThatCannotBeMadeIsAnError) {
  const Result result = serried(shell({"-n", "2", "--log-dir", "/dev/null/x"}, "echo no"));
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_EQ(result.out, "");
  EXPECT_THAT(result.err, HasSubstr("[run] cannot make the folder /dev/null/x/attempt_0: Not a directory\n  fix: "));
}

TEST(LaunchRun, TwoJobsAtOnceDoNotDisturbEachOther) {
  const auto script = [](const std::string& name, int code) {
    return "trap 'echo " + name + " $RANK; exit " + std::to_string(code) +
           "' USR1; echo ready $MASTER_PORT; while :; do sleep 0.01; done";
  };
  Command first(shell({"-n", "2"}, script("first", 0)));
  Command second(shell({"-n", "2"}, script("second", 3)));
  first.wait_for("ready", 2);
  second.wait_for("ready", 2);
  second.send(SIGUSR1);
  EXPECT_EQ(second.finish().exit_code, 3);
  first.send(SIGUSR1);
  const Result result = first.finish();
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_THAT(result.out, AllOf(HasSubstr("first 0"), HasSubstr("first 1"), Not(HasSubstr("second"))));
}

TEST(LaunchRun, JobEndsWhenNobodyReadsItsOutput) {
  const Result result = serried(shell({}, std::string(SERRIED_BINARY) + " run -n 2 yes | head -1; echo end; exit 0"));
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_THAT(result.out, HasSubstr("end\n"));
  EXPECT_THAT(result.err, HasSubstr("nobody reads the output of the job any more"));
}

}  // namespace
}  // namespace serried::testing
