// `serried run --hosts` with a script in the place of ssh, which runs the command right here.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <signal.h>

#include <filesystem>

#include "serried/launch/error.h"
#include "serried/launch/hostfile.h"
#include "serried/launch/version.h"
#include "tests/process/command.h"

namespace serried::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::UnorderedElementsAre;

/// A script with ssh's arguments: options, a host, a command. What it is called with is kept.
class FakeSsh {
 public:
  explicit FakeSsh(const std::string& before = "") {
    write_file(path(), "#!/bin/sh\necho \"$@\" >> " + folder_.path() + "/calls\nshift 2; host=$1; shift\n" + before +
                           "\nexec sh -c \"$*\"\n");
    std::filesystem::permissions(path(), std::filesystem::perms::owner_all);
  }
  std::string path() const { return folder_.path() + "/ssh"; }
  std::string calls() const { return read_file(folder_.path() + "/calls"); }
  const TemporaryFolder& folder() const { return folder_; }

 private:
  TemporaryFolder folder_;
};

std::vector<std::string> on_hosts(const FakeSsh& ssh, const std::string& script,
                                  const std::vector<std::string>& more = {"--hosts", "here:2,there"}) {
  std::vector<std::string> options = {"--ssh", ssh.path(), "--rendezvous", "127.0.0.1:" + std::to_string(free_port())};
  options.insert(options.end(), more.begin(), more.end());
  return shell(options, script);
}

TEST(LaunchFleet, OneCommandStartsTheLaunchersAndShowsAllOutput) {
  const FakeSsh ssh("echo a banner of $host");
  const Result result = serried(on_hosts(ssh, "echo $RANK/$WORLD_SIZE local $LOCAL_RANK node $GROUP_RANK"));
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(lines_of(result.out), UnorderedElementsAre("[rank 0] 0/3 local 0 node 0", "[rank 1] 1/3 local 1 node 0",
                                                         "[rank 2] 2/3 local 0 node 1"));
  EXPECT_THAT(lines_of(result.err), UnorderedElementsAre("[here] a banner of here", "[there] a banner of there"));
}

TEST(LaunchFleet, TheTokenIsNeitherOnTheCommandLineNorInTheRanks) {
  const FakeSsh ssh;
  const std::string token(64, 'c');
  const Result result = serried(on_hosts(ssh, "env | grep -c " + token + "; true"), {"SERRIED_TOKEN=" + token});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(lines_of(result.out), UnorderedElementsAre("[rank 0] 0", "[rank 1] 0", "[rank 2] 0"));
  EXPECT_THAT(ssh.calls(), Not(HasSubstr(token)));
  for (const std::string& call : lines_of(ssh.calls())) EXPECT_THAT(call, HasSubstr("-o BatchMode=yes "));
  EXPECT_EQ(lines_of(ssh.calls()).size(), 2u);
}

TEST(LaunchFleet, VariablesGoAlongIfTheirNamesSaySo) {
  const FakeSsh ssh("unset SERRIED_LOG OMP_PLACES WANTED OTHER");
  const std::vector<std::string> set = {"SERRIED_LOG=comm", "OMP_PLACES=cores", "WANTED=a b'c", "OTHER=x"};
  const Result result = serried(
      on_hosts(ssh, "echo $SERRIED_LOG $OMP_PLACES \"$WANTED\" $OTHER.", {"--hosts", "here,there", "-x", "WANTED"}),
      set);
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(lines_of(result.out), UnorderedElementsAre("[rank 0] comm cores a b'c .", "[rank 1] comm cores a b'c ."));
  const Result missing = serried(on_hosts(ssh, "true", {"--hosts", "here,there", "-x", "NOT_THERE"}));
  EXPECT_EQ(missing.exit_code, 2);
  EXPECT_EQ(missing.err, "[run] -x NOT_THERE is given, but NOT_THERE is not set\n  fix: export it, or leave it out\n");
}

TEST(LaunchFleet, AFailureIsToldOnceWithItsCode) {
  const FakeSsh ssh;
  const Result result = serried(on_hosts(ssh, "[ $RANK = 2 ] || exec sleep 100; echo boom >&2; exit 21"));
  EXPECT_EQ(result.exit_code, 21);
  EXPECT_EQ(count_of(result.err, "[run] rank 2 of 3 on node 1 ("), 1) << result.err;
  EXPECT_LT(result.seconds, 5);
}

TEST(LaunchFleet, RestartsAreToldOnce) {
  const FakeSsh ssh;
  const Result result = serried(
      on_hosts(ssh, "[ $TORCHELASTIC_RESTART_COUNT = 1 ] || exit 3", {"--hosts", "here,there", "--max-restarts", "1"}));
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(count_of(result.err, "restart 1 of 1"), 1) << result.err;
}

TEST(LaunchFleet, EachHostCountsItsOwnCores) {
  const FakeSsh ssh("[ $host = here ] || set -- taskset -c 0 \"$*\"; [ $# = 1 ] || { exec $1 $2 $3 sh -c \"$4\"; }");
  const Result result =
      serried(on_hosts(ssh, "echo $GROUP_RANK has $LOCAL_WORLD_SIZE", {"-n", "auto", "--hosts", "here:2,there"}));
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(lines_of(result.out), UnorderedElementsAre("[rank 0] 0 has 2", "[rank 1] 0 has 2", "[rank 2] 1 has 1"));
}

TEST(LaunchFleet, OnlyTheRanksAskedForAreShown) {
  const FakeSsh ssh;
  const Result result = serried(on_hosts(ssh, "echo hello; [ $RANK != 1 ] || { echo boom >&2; exit 3; }; sleep 100",
                                         {"--hosts", "here:2,there:2", "--only-ranks", "0,2-3"}));
  EXPECT_EQ(result.exit_code, 3);
  EXPECT_THAT(result.out, Not(HasSubstr("[rank 1]")));
  EXPECT_THAT(result.err, HasSubstr("its last lines of stderr:\n    boom\n"));
  EXPECT_THAT(result.err, Not(HasSubstr("[rank 1]")));
  const Result local = serried(shell({"-n", "4", "--only-ranks", "1-2"}, "echo hello"));
  EXPECT_THAT(lines_of(local.out), UnorderedElementsAre("[rank 1] hello", "[rank 2] hello"));
}

TEST(LaunchFleet, CtrlCEndsAll) {
  const FakeSsh ssh;
  Command command(on_hosts(ssh, "echo ready; exec sleep 100"));
  command.wait_for("ready", 3);
  command.send(SIGINT);
  const Result result = command.finish();
  EXPECT_EQ(result.exit_code, 130) << result.err;
  EXPECT_LT(result.seconds, 5);
  EXPECT_TRUE(command.nothing_left());
}

TEST(LaunchFleet, NothingIsLeftIfTheCommandIsKilled) {
  const FakeSsh ssh;
  Command command(on_hosts(ssh, "echo ready; exec sleep 100"));
  command.wait_for("ready", 3);
  command.send(SIGKILL);
  EXPECT_EQ(command.finish().exit_code, 137);
  EXPECT_TRUE(command.nothing_left());
}

TEST(LaunchFleet, AnSshThatEndsIsALostNode) {
  const FakeSsh ssh("echo $$ > $(dirname $0)/$host; sh -c \"$*\"; exit $?");
  Command command(on_hosts(ssh, "echo ready; exec sleep 100"));
  command.wait_for("ready", 3);
  ::kill(std::stoi(read_file(ssh.folder().path() + "/there")), SIGKILL);
  const Result result = command.finish();
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.err, HasSubstr("[run] lost the launcher of node 1 ("));
  EXPECT_TRUE(command.nothing_left());
}

TEST(LaunchFleet, AnSshThatAsksForAPasswordIsAnError) {
  const FakeSsh ssh("[ $host = here ] || { echo 'me@there: Permission denied (publickey,password).' >&2; exit 255; }");
  const Result result = serried(on_hosts(ssh, "echo never"));
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_EQ(result.out, "");
  EXPECT_THAT(result.err, HasSubstr("[run] " + ssh.path() +
                                    " to there ended with code 255: me@there: Permission denied (publickey,password).\n"
                                    "  fix: it asks for a password, or knows no key of yours: let " +
                                    ssh.path() + " there true work without a question, by ssh-copy-id or ssh-agent\n"));
}

TEST(LaunchFleet, AHostWithoutSerriedIsAnError) {
  const FakeSsh ssh("[ $host = here ] || { echo 'sh: 1: serried: not found' >&2; exit 127; }");
  const Result result = serried(on_hosts(ssh, "echo never"));
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.err,
              HasSubstr("[run] no launcher began on there: the command there ended with code 127: sh: 1: "
                        "serried: not found\n  fix: serried and this folder have to be at the same place on "
                        "every host\n"));
}

TEST(LaunchFleet, AFirstHostThatCannotListenEndsAllAtOnce) {
  const FakeSsh ssh;
  const Result result =
      serried(shell({"--hosts", "here,there", "--ssh", ssh.path(), "--rendezvous", "192.0.2.1:0"}, "echo never"));
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_EQ(result.out, "");
  EXPECT_EQ(count_of(result.err, "[run] cannot listen on 192.0.2.1:0: 192.0.2.1 is no address of this machine\n"), 1)
      << result.err;
  EXPECT_LT(result.seconds, 5);
}

TEST(LaunchFleet, AHostWithAnotherVersionIsAnErrorThatNamesBoth) {
  const FakeSsh ssh(
      "[ $host = here ] || { echo 'serried launcher is here: serried 9.9.9 for LibTorch 3.0'; cat; exit; }");
  const Result result = serried(on_hosts(ssh, "echo never"));
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.err, HasSubstr("[run] there has serried 9.9.9 for LibTorch 3.0, and this host, "));
  EXPECT_THAT(result.err, HasSubstr(launch::version_text() + "\n  fix: "));
}

TEST(LaunchFleet, AHostThatDoesNotAnswerIsNamed) {
  const FakeSsh ssh("[ $host = here ] || exec sleep 100");
  const Result result =
      serried(on_hosts(ssh, "echo never", {"--hosts", "here,there", "--join-timeout", "0.5", "--grace", "0"}));
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.err, HasSubstr("[run] no launcher began on there within 0.5 s\n  fix: "));
}

TEST(LaunchFleet, OptionsThatDoNotGoTogetherAreRefused) {
  const auto error = [](std::vector<std::string> options) { return serried(shell(std::move(options), "true")).err; };
  EXPECT_THAT(error({"--hosts", "a", "--hostfile", "f"}), HasSubstr("[run] --hosts and --hostfile are both given\n"));
  EXPECT_THAT(error({"--hosts", "a,b", "--node-rank", "0"}), HasSubstr("[run] --node-rank is given beside --hosts\n"));
  EXPECT_THAT(error({"--hosts", "a,b", "--nnodes", "3"}), HasSubstr("[run] --nnodes is 3, and --hosts names 2\n"));
  EXPECT_THAT(error({"--hosts", "a,b", "--rendezvous", "a"}), HasSubstr("[run] --rendezvous \"a\" is not host:port\n"));
  EXPECT_THAT(error({"--hosts", "a,b", "--ssh", " "}), HasSubstr("[run] --ssh is empty\n"));
  for (const char* bad : {"x", "1,", "3-2", "1-", "-1", "1 2", "99999999"}) {
    EXPECT_EQ(error({"--only-ranks=" + std::string(bad)}), "[run] --only-ranks is \"" + std::string(bad) +
                                                               "\", which is no list of ranks\n  fix: pass numbers and "
                                                               "ranges, for example 0,4-6\n");
  }
  EXPECT_THAT(error({"--hosts", "a,b:x"}), HasSubstr("[run] --hosts, column 5: \"x\" is no number of ranks\n"));
}

TEST(LaunchHostfile, NamesHostsAndTheirRanks) {
  const TemporaryFolder folder;
  const std::string path = folder.path() + "/hosts";
  write_file(path, "# our machines\nnode1:4\n  me@node2 slots=2  # the old one\n\nnode3\r\n[fe80::1]:8");
  const std::vector<launch::Host> hosts = launch::read_hostfile(path);
  ASSERT_EQ(hosts.size(), 4u);
  EXPECT_EQ(hosts[0].name + std::to_string(hosts[0].num_ranks), "node14");
  EXPECT_EQ(hosts[1].name + std::to_string(hosts[1].num_ranks), "me@node22");
  EXPECT_EQ(hosts[2].name + std::to_string(hosts[2].num_ranks), "node30");
  EXPECT_EQ(hosts[3].name + std::to_string(hosts[3].num_ranks), "fe80::18");
}

TEST(LaunchHostfile, AMistakeIsToldWithLineAndColumn) {
  const TemporaryFolder folder;
  const std::string path = folder.path() + "/hosts";
  const auto error_of = [&](const std::string& text) -> std::string {
    write_file(path, text);
    try {
      launch::read_hostfile(path);
    } catch (const launch::LaunchError& error) {
      EXPECT_EQ(error.exit_code(), launch::kExitUsage);
      return std::string(error.what()).substr(0, std::string(error.what()).find('\n'));
    }
    return "";
  };
  const std::string at = "[run] " + path + ":";
  EXPECT_EQ(error_of("node1:4\nnode2:four"), at + "2:7: \"four\" is no number of ranks");
  EXPECT_EQ(error_of("node1:0"), at + "1:7: \"0\" is no number of ranks");
  EXPECT_EQ(error_of("node1 slot=4"), at + "1:7: \"slot=4\" says nothing here");
  EXPECT_EQ(error_of("a slots=x"), at + "1:9: \"x\" is no number of ranks");
  EXPECT_EQ(error_of("a:1 slots=2"), at + "1:5: \"slots=2\" says nothing here");
  EXPECT_EQ(error_of("a slots=2 b"), at + "1:11: \"b\" says nothing here");
  EXPECT_EQ(error_of("\n\n  -oProxyCommand=x"), at + "3:3: \"-oProxyCommand=x\" is no name of a host");
  EXPECT_EQ(error_of("me@-x"), at + "1:1: \"me@-x\" is no name of a host");
  EXPECT_EQ(error_of("no;de"), at + "1:3: \"no;de\" is no name of a host");
  EXPECT_EQ(error_of(":4"), at + "1:1: there is no name");
  EXPECT_EQ(error_of("a\nb\na"), at + "3:1: a is there twice");
  EXPECT_EQ(error_of("[::1]x"), at + "1:6: after ] comes :ranks or nothing");
  EXPECT_EQ(error_of("# nobody\n"), "[run] " + path + " names no host");
  EXPECT_THROW(launch::read_hostfile(folder.path() + "/none"), launch::LaunchError);
}

}  // namespace
}  // namespace serried::testing
