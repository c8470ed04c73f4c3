// Orphans of ranks come to the launcher, and none stays a zombie.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <poll.h>
#include <signal.h>

#include <chrono>
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

}  // namespace
}  // namespace serried::testing
