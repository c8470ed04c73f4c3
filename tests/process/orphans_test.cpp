// Orphans of ranks come to the launcher: none stays a zombie, and none outlives the job.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <poll.h>
#include <signal.h>
#include <sys/stat.h>

#include <chrono>
#include <cstdlib>
#include <sstream>

#include "tests/process/command.h"

namespace serried::testing {
namespace {

constexpr const char* kMakeOrphans =
    "pids=$(i=0; while [ $i -lt 400 ]; do sleep 100 > /dev/null 2>&1 & echo $!; i=$((i + 1)); done)\n";

std::vector<pid_t> children_of(pid_t parent) {
  const std::string process = "/proc/" + std::to_string(parent);
  std::istringstream text(read_file(process + "/task/" + std::to_string(parent) + "/children"));
  std::vector<pid_t> result;
  for (pid_t child; text >> child;) result.push_back(child);
  return result;
}

int zombies_of(pid_t parent) {
  int count = 0;
  for (const pid_t child : children_of(parent)) {
    const std::string stat = read_file("/proc/" + std::to_string(child) + "/stat");
    count += stat.find(") Z ") != std::string::npos ? 1 : 0;
  }
  return count;
}

// Orphans die a moment after they are killed, and the launcher hears of it a moment later.
void expect_children(const Command& command, size_t count, int num_zombies) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  const auto are_there = [&] {
    return children_of(command.pid()).size() == count && zombies_of(command.pid()) == num_zombies;
  };
  while (!are_there() && std::chrono::steady_clock::now() < deadline) ::poll(nullptr, 0, 5);
  EXPECT_EQ(children_of(command.pid()).size(), count);
  EXPECT_EQ(zombies_of(command.pid()), num_zombies);
}

TEST(LaunchOrphans, ThatEndTogetherAreAllReaped) {
  Command command(shell({"-n", "1"}, std::string(kMakeOrphans) + "kill -9 $pids; echo killed; exec sleep 100"));
  command.wait_for("killed");
  expect_children(command, 2, 0);  // the rank and the guard
  command.send(SIGINT);
  command.finish();
  EXPECT_TRUE(command.nothing_left());
}

TEST(LaunchOrphans, AreReapedAlsoAfterARankHasEnded) {
  TemporaryFolder folder;
  const std::string fifo = make_fifo(folder);
  // An ended rank stays a zombie while the attempt lasts, before the orphans in the kernel's list.
  Command command(shell({"-n", "2"}, "if [ $RANK = 0 ]; then echo > " + fifo + "; exit 0; fi\nread x < " + fifo + "\n" +
                                         kMakeOrphans + "kill -9 $pids; echo killed; exec sleep 100"));
  command.wait_for("killed");
  expect_children(command, 3, 1);
  command.send(SIGINT);
  command.finish();
  EXPECT_TRUE(command.nothing_left());
}

bool is_alive(pid_t process) {
  const std::string stat = read_file("/proc/" + std::to_string(process) + "/stat");
  return !stat.empty() && stat.find(") Z ") == std::string::npos;
}

// The process whose number a script has written to `file`.
pid_t process_in(const std::string& file) {
  const std::string text = read_file(file);
  if (text.empty()) throw std::runtime_error(file + " is empty");
  return std::stoi(text);
}

/// A rank's script: starts `child` in a session of its own, which has to `echo > $fifo`, waits for that, then runs
/// `end`.
std::string with_child(const TemporaryFolder& folder, const std::string& child, const std::string& end) {
  return "fifo=" + make_fifo(folder) + "; export fifo\nsetsid sh -c '" + child + "' &\nread x < $fifo\n" + end;
}

TEST(LaunchOrphans, EndWithTheJobInWhateverSessionTheyAre) {
  const std::vector<std::string> children = {
      "echo > $fifo; exec sleep 100",
      "(setsid sleep 100 &) ; echo > $fifo",   // a daemon, whose parents have ended
      "echo > $fifo; setsid sleep 100; true",  // has a child in yet another session
      "echo > $fifo; kill -STOP $$",
  };
  for (const std::string& child : children) {
    for (const int code : {0, 3}) {
      TemporaryFolder folder;
      const Result result =  // checks that nothing is left
          serried(shell({"--grace", "100"}, with_child(folder, child, "exit " + std::to_string(code))));
      EXPECT_EQ(result.exit_code, code) << child;
    }
  }
}

TEST(LaunchOrphans, EndWithTheJobAlsoWithoutAnEnvironment) {
  TemporaryFolder folder;
  const std::string file = folder.path() + "/pid";
  const std::string child = "exec env -i sh -c \"echo \\$\\$ > " + file + "; echo > $fifo; exec sleep 100\"";
  EXPECT_EQ(serried(shell({}, with_child(folder, child, "exit 0"))).exit_code, 0);
  EXPECT_FALSE(is_alive(process_in(file)));
}

TEST(LaunchOrphans, AreAskedToEndBeforeTheyAreKilled) {
  TemporaryFolder folder;
  const std::string child = "trap \"echo asked; exit 0\" TERM; echo > $fifo; while :; do sleep 0.01; done";
  const Result result = serried(shell({"--grace", "100"}, with_child(folder, child, "exit 0")));
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.out, "[rank 0] asked\n");
  EXPECT_EQ(result.err, "");
}

constexpr const char* kDeafChild = "trap \"\" TERM INT; echo > $fifo; while :; do sleep 1; done";

TEST(LaunchOrphans, ThatDoNotEndAreKilledAfterTheGrace) {
  TemporaryFolder folder;
  const Result result = serried(shell({"--grace", "0.4"}, with_child(folder, kDeafChild, "exit 0")));
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.err, "[run] not all processes that ranks started ended within 0.4 s: killing them\n");
}

// A deaf rank has used up the grace; its deaf child gets none of its own.
TEST(LaunchOrphans, HaveOneGraceWithTheirRanks) {
  TemporaryFolder folder;
  const std::string gate = folder.path() + "/gate";
  ASSERT_EQ(::mkfifo(gate.c_str(), 0600), 0);
  const std::string deaf =
      with_child(folder, kDeafChild, "trap \"\" TERM; echo > " + gate + "; while :; do sleep 1; done");
  const Result result = serried(
      shell({"-n", "2", "--grace", "0.4"}, "if [ $RANK = 1 ]; then read x < " + gate + "; exit 5; fi\n" + deaf));
  EXPECT_EQ(result.exit_code, 5);
  EXPECT_THAT(result.err, ::testing::HasSubstr("[run] not all ranks ended within 0.4 s: killing them\n"));
  EXPECT_THAT(result.err, ::testing::Not(::testing::HasSubstr("processes that ranks started")));
}

TEST(LaunchOrphans, AreKilledAtOnceByASecondCtrlC) {
  TemporaryFolder folder;
  Command command(shell({"--grace", "100"}, with_child(folder, kDeafChild,
                                                       "trap 'echo got INT; exit 0' INT; echo ready; "
                                                       "while :; do sleep 0.01; done")));
  command.wait_for("ready");
  command.send(SIGINT);
  command.wait_for("got INT");
  command.send(SIGINT);
  EXPECT_EQ(command.finish().exit_code, 130);
  EXPECT_TRUE(command.nothing_left());
}

TEST(LaunchOrphans, OfAnAttemptAreGoneBeforeTheNext) {
  TemporaryFolder folder;
  const std::string file = folder.path() + "/pid";
  const Result result =
      serried(shell({"--max-restarts", "1"},
                    "[ $TORCHELASTIC_RESTART_COUNT = 1 ] && exec test ! -e /proc/$(cat " + file + ")\n" +
                        with_child(folder, "echo $$ > " + file + "; echo > $fifo; exec sleep 100", "exit 3")));
  EXPECT_EQ(result.exit_code, 0);
}

// A shell that becomes a launcher leaves it its children, and those of its children that lose their parent.
TEST(LaunchOrphans, OfOthersAreLeftAlone) {
  TemporaryFolder folder;
  const std::string path = folder.path();
  const std::string fifo = make_fifo(folder);
  write_file(path + "/shell", "sleep 100 & echo $! > " + path + "/child\n" +  //
                                  "sh -c 'read x < " + fifo + "; sleep 100 & echo $! > " + path +
                                  "/grandchild; echo > " + fifo + "' &\n" +  //
                                  "exec " SERRIED_BINARY " run sh -c 'echo > " + fifo + "; read x < " + fifo +
                                  "; setsid sleep 100 & echo $! > " + path + "/ours'\n");
  ASSERT_EQ(std::system(("sh " + path + "/shell").c_str()), 0);
  EXPECT_FALSE(is_alive(process_in(path + "/ours")));
  for (const std::string& file : {path + "/child", path + "/grandchild"}) {
    EXPECT_TRUE(is_alive(process_in(file))) << file;
    ::kill(process_in(file), SIGKILL);
  }
}

}  // namespace
}  // namespace serried::testing
