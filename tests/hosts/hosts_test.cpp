// The hosts themselves: what they share, what they do not, and what the words do to them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <poll.h>
#include <signal.h>
#include <sys/wait.h>

#include <filesystem>
#include <functional>

#include "tests/hosts/hosts.h"

namespace serried::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr int kRefused = 1;
constexpr int kSilence = 124;

/// What a connection to a port of `to` where nobody listens ends in: a refusal has gone there and back.
int knock(const Hosts& hosts, int from, int to) {
  const std::string place = "/dev/tcp/" + hosts.name(to) + "/9";
  return hosts.run(from, {"timeout", "1", "bash", "-c", "exec 3<>" + place}).exit_code;
}

bool soon(const std::function<bool()>& condition) {
  for (int i = 0; i < 1000 && !condition(); ++i) ::poll(nullptr, 0, 5);
  return condition();
}

/// The letter that the kernel has for the state of a process: T is stopped.
char state_of(pid_t pid) {
  const std::string stat = read_file("/proc/" + std::to_string(pid) + "/stat");
  const size_t end = stat.rfind(')');
  return end == std::string::npos ? '-' : stat[end + 2];
}

TEST(Hosts, HaveNamesAndReachEachOther) {
  const Hosts hosts(3);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(hosts.run(i, {"hostname"}).out, hosts.name(i) + "\n");
    EXPECT_THAT(hosts.run(i, {"ip", "-brief", "address"}).out, HasSubstr(hosts.address(i) + "/24"));
    EXPECT_EQ(knock(hosts, i, (i + 1) % 3), kRefused);
  }
  EXPECT_THAT(hosts.run(1, {"getent", "hosts", "h1"}).out, HasSubstr(hosts.address(1)));
}

TEST(Hosts, ResolveTheirOwnNameToLoopbackIfAsked) {
  const Hosts hosts(2, {.trap = true});
  EXPECT_THAT(hosts.run(1, {"getent", "hosts", "h1"}).out, HasSubstr("127.0.1.1"));
  EXPECT_THAT(hosts.run(1, {"getent", "hosts", "h0"}).out, HasSubstr(hosts.address(0)));
}

TEST(Hosts, ShareFilesButNeitherMemoryNorProcesses) {
  const Hosts hosts(2);
  const TemporaryFolder folder;
  EXPECT_EQ(hosts.run(0, {"touch", "/dev/shm/mine", folder.path() + "/ours"}).exit_code, 0);
  EXPECT_EQ(hosts.run(0, {"ls", "/dev/shm"}).out, "mine\n");
  EXPECT_EQ(hosts.run(1, {"ls", "/dev/shm"}).out, "");
  EXPECT_EQ(hosts.run(1, {"ls", folder.path()}).out, "ours\n");
  EXPECT_FALSE(std::filesystem::exists("/dev/shm/mine"));
  Command other = hosts.start(1, {"sh", "-c", "echo ready; exec tail -f /dev/null"});
  other.wait_for("ready");
  EXPECT_THAT(hosts.run(0, {"sh", "-c", "cat /proc/[0-9]*/comm"}).out, Not(HasSubstr("tail")));
  EXPECT_TRUE(soon([&] {
    return hosts.run(1, {"sh", "-c", "cat /proc/[0-9]*/comm"}).out.find("tail") != std::string::npos;
  }));
}

TEST(Hosts, PassOnExitCodesAndOutput) {
  const Hosts hosts(1);
  const Result result = hosts.run(0, {"sh", "-c", "echo out; echo err >&2; exit 7"});
  EXPECT_EQ(result.exit_code, 7);
  EXPECT_EQ(result.out, "out\n");
  EXPECT_EQ(result.err, "err\n");
  const Result killed = hosts.run(0, {"sh", "-c", "kill -9 $$"});
  EXPECT_EQ(killed.exit_code, 137);
  EXPECT_EQ(killed.err, "");
}

TEST(Hosts, AreCutOffAndHealed) {
  const Hosts hosts(3);
  hosts.cut(0, 1);
  EXPECT_EQ(knock(hosts, 0, 1), kSilence);
  EXPECT_EQ(knock(hosts, 0, 2), kRefused);
  hosts.heal(0, 1);
  EXPECT_EQ(knock(hosts, 0, 1), kRefused);
  hosts.cut(2);
  EXPECT_EQ(knock(hosts, 0, 2), kSilence);
  EXPECT_EQ(knock(hosts, 0, 1), kRefused);
  hosts.heal(2);
  EXPECT_EQ(knock(hosts, 0, 2), kRefused);
}

TEST(Hosts, FreezeAndThaw) {
  const Hosts hosts(2);
  Command other = hosts.start(0, {"sh", "-c", "echo ready; exec sleep 100"});
  const TemporaryFolder folder;
  const std::string number = folder.path() + "/number";
  Command command = hosts.start(
      1, {"sh", "-c", "trap 'exit 3' USR1; echo $$ >" + number + "; echo ready; while :; do sleep 0.01; done"});
  other.wait_for("ready");
  command.wait_for("ready");
  const std::vector<pid_t> all = command.processes();
  hosts.freeze(1);
  EXPECT_TRUE(soon([&] {
    int stopped = 0;
    for (const pid_t pid : all) stopped += state_of(pid) == 'T';
    return stopped > 0;
  }));
  EXPECT_EQ(knock(hosts, 0, 1), kRefused);  // the kernel is awake
  for (const pid_t pid : other.processes()) EXPECT_NE(state_of(pid), 'T');
  EXPECT_NE(state_of(command.pid()), 'T');
  hosts.thaw(1);
  hosts.run(1, {"sh", "-c", "kill -USR1 $(cat " + number + ")"});
  EXPECT_EQ(command.finish().exit_code, 3);
}

TEST(Hosts, StayWhenTheirProcessesAreKilled) {
  const Hosts hosts(2);
  Command command = hosts.start(1, {"sh", "-c", "sleep 100 & echo ready; wait"});
  command.wait_for("ready");
  hosts.kill(1);
  EXPECT_EQ(command.finish().exit_code, 137);
  EXPECT_TRUE(command.nothing_left());
  EXPECT_EQ(knock(hosts, 0, 1), kRefused);
  EXPECT_EQ(hosts.run(1, {"hostname"}).out, "h1\n");
}

TEST(Hosts, GoOffWithoutAWordAndComeBackEmpty) {
  const Hosts hosts(2);
  Command listener = hosts.start(1, {"sh", "-c", "touch /dev/shm/old; echo ready; exec sleep 100"});
  listener.wait_for("ready");
  hosts.off(1);
  EXPECT_EQ(listener.finish().exit_code, 137);
  EXPECT_TRUE(listener.nothing_left());
  EXPECT_EQ(knock(hosts, 0, 1), kSilence);
  hosts.on(1);
  EXPECT_EQ(knock(hosts, 0, 1), kRefused);
  EXPECT_EQ(hosts.run(1, {"ls", "/dev/shm"}).out, "");
}

TEST(Hosts, SendAsFastAsTheirLinkLets) {
  const Hosts hosts(2);
  hosts.link(0, 200);
  EXPECT_THAT(hosts.run(0, {"tc", "qdisc", "show", "dev", "eth0"}).out, HasSubstr("rate 200Mbit"));
  EXPECT_EQ(knock(hosts, 0, 1), kRefused);
  hosts.link(0);
  EXPECT_THAT(hosts.run(0, {"tc", "qdisc", "show", "dev", "eth0"}).out, Not(HasSubstr("tbf")));
}

TEST(Hosts, LiveSideBySide) {
  const Hosts hosts(2);
  const Hosts others(2);
  EXPECT_EQ(hosts.run(0, {"touch", "/dev/shm/mine"}).exit_code, 0);
  EXPECT_EQ(others.run(0, {"ls", "/dev/shm"}).out, "");
  others.off(1);
  EXPECT_EQ(knock(hosts, 0, 1), kRefused);
  EXPECT_EQ(knock(others, 0, 1), kSilence);
}

TEST(Hosts, LeaveNothingBehind) {
  const Hosts hosts(2);
  Command command = hosts.start(1, {"sh", "-c", "sleep 100 & echo ready; wait"});
  command.wait_for("ready");
  hosts.freeze(1);
  hosts.down();
  EXPECT_EQ(command.finish().exit_code, 137);
  EXPECT_TRUE(command.nothing_left());
  EXPECT_THAT(state_of(hosts.keeper()), ::testing::AnyOf('-', 'Z'));
}

}  // namespace
}  // namespace serried::testing
