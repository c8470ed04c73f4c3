// `serried rendezvous`: a leader without ranks, so that any node of the job may be lost.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <signal.h>

#include <memory>
#include <regex>

#include "serried/launch/socket.h"
#include "tests/process/command.h"

namespace serried::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;
using ::testing::UnorderedElementsAre;

std::string address(int port) {
  return "127.0.0.1:" + std::to_string(port);
}

std::vector<std::string> leader(int port, const std::string& nodes, std::vector<std::string> more = {}) {
  more.insert(more.begin(), {"rendezvous", "--listen", address(port), "--nnodes", nodes});
  return more;
}

/// The same line for every node.
std::vector<std::string> led(int port, const std::string& nodes, const std::string& script,
                             std::vector<std::string> more = {}) {
  more.insert(more.begin(), {"--nnodes", nodes, "--rendezvous", address(port)});
  return shell(more, script);
}

TEST(LaunchRendezvous, NodesMeetAtALeaderWithoutRanks) {
  const int port = free_port();
  const std::string script = "echo $RANK of $WORLD_SIZE on $GROUP_RANK of $GROUP_WORLD_SIZE, $MASTER_ADDR";
  Command second(led(port, "2", script, {"-n", "2", "--node-rank", "1"}));  // comes first and waits
  second.wait_for("[run] waiting for node 0 at " + address(port));
  Command head(leader(port, "2"));
  head.wait_for("[run] " + launch::host_name() + " leads the job that meets at " + address(port) +
                ", for --nnodes 2\n");
  Command first(led(port, "2", script));
  std::string out;
  for (Command* command : {&first, &second}) {
    const Result result = command->finish();
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_TRUE(command->nothing_left());
    out += result.out;
  }
  EXPECT_THAT(lines_of(out),
              UnorderedElementsAre("[rank 0] 0 of 3 on 0 of 2, 127.0.0.1", "[rank 1] 1 of 3 on 1 of 2, 127.0.0.1",
                                   "[rank 2] 2 of 3 on 1 of 2, 127.0.0.1"));
  const Result result = head.finish();
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(result.out, "");
}

// Programs that call c10d themselves meet at a port that rank 0 inherits, one for each attempt.
TEST(LaunchRendezvous, RankZeroInheritsThePortOfItsNode) {
  const int port = free_port();
  const TemporaryFolder folder;
  const std::string script =
      "echo attempt $TORCHELASTIC_RESTART_COUNT port $MASTER_PORT\n"
      "if [ $RANK = 0 ]; then\n"
      "  inode=$(readlink /proc/$$/fd/$SERRIED_MASTER_LISTEN_FD | tr -dc 0-9)\n"
      "  grep -qi \":$(printf %04X $MASTER_PORT) .* $inode \" /proc/net/tcp && echo it listens there\n  touch " +
      folder.path() +
      "/looked\n"
      "elif [ -n \"$SERRIED_MASTER_LISTEN_FD\" ]; then echo rank $RANK has it too; fi\n"
      "[ $TORCHELASTIC_RESTART_COUNT = 1 ] || { [ $RANK = 0 ] && exec sleep 100\n  until [ -e " +
      folder.path() + "/looked ]; do sleep 0.01; done; exit 3; }";
  Command head(leader(port, "2", {"--max-restarts", "1"}));
  head.wait_for("leads");
  Command first(led(port, "2", script));
  Command second(led(port, "2", script));
  const Result a = first.finish(), b = second.finish();
  EXPECT_EQ(head.finish().exit_code, 0);
  EXPECT_EQ(count_of(a.out + b.out, "it listens there"), 2) << a.out << b.out;
  EXPECT_THAT(a.out + b.out, Not(HasSubstr("has it too")));
  std::smatch match;
  for (const char* attempt : {"attempt 0 port ", "attempt 1 port "}) {
    const std::regex told(std::string(attempt) + "(\\d+)");
    ASSERT_TRUE(std::regex_search(a.out, match, told)) << a.out;
    EXPECT_EQ(count_of(a.out + b.out, match[0].str() + "\n"), 2) << a.out << b.out;
  }
}

// Whichever it is: the one with rank 0 as well.
TEST(LaunchRendezvous, AnyNodeMayBeLost) {
  for (const int victim : {0, 1, 2}) {
    const int port = free_port();
    const std::string script =
        "echo $RANK of $WORLD_SIZE in $TORCHELASTIC_RESTART_COUNT\n"
        "[ $TORCHELASTIC_RESTART_COUNT = 1 ] || exec sleep 100";
    Command head(leader(port, "2:3", {"--max-restarts", "1"}));
    head.wait_for("leads");
    std::vector<std::unique_ptr<Command>> nodes;
    for (const char* rank : {"0", "1", "2"}) {
      // Not the first node's rank: that one would have to lead.
      std::vector<std::string> more;
      if (rank[0] != '0') more = {"--node-rank", rank};
      nodes.push_back(std::make_unique<Command>(led(port, "2:3", script, more)));
    }
    for (const auto& node : nodes) node->wait_for("of 3 in 0\n");
    nodes[size_t(victim)]->send(SIGKILL);
    std::string out;
    for (int node = 0; node < 3; ++node) {
      const Result result = nodes[size_t(node)]->finish();
      EXPECT_EQ(result.exit_code, node == victim ? 137 : 0) << result.err;
      if (node == victim) continue;
      out += result.out;
      EXPECT_THAT(result.err, HasSubstr("[run] restart 1 of 1: all ranks start again on 2 nodes\n"));
    }
    EXPECT_EQ(count_of(out, "of 2 in 1\n"), 2) << out;
    const Result result = head.finish();
    EXPECT_EQ(result.exit_code, 0);
    EXPECT_THAT(result.err, HasSubstr("[run] lost the launcher of node "));
    EXPECT_THAT(result.err, HasSubstr("; its 3 ranks are ended\n[run] restart 1 of 1: all ranks start again on 2"));
  }
}

std::vector<std::string> kept(int port, std::vector<std::string> options) {
  options.insert(options.begin(), {"run", "--rendezvous", address(port)});
  options.push_back(SERRIED_ELASTIC_RANK);
  return options;
}

TEST(LaunchRendezvous, RanksThatLiveOnOutliveTheNodeOfRankZero) {
  const int port = free_port();
  Command head(leader(port, "1:3", {"--keep-going", "--last-call", "0.3"}));
  head.wait_for("leads");
  Command first(kept(port, {"--nnodes", "1:3", "--keep-going"}));
  first.wait_for("began in generation 0 as 0 of 1");
  Command second(kept(port, {"--nnodes", "1:3", "-n", "2"}));
  second.wait_for("began in generation 1", 2);
  first.send(SIGKILL);
  second.wait_for("table 2 ", 2);
  EXPECT_THAT(second.so_far(), HasSubstr("over 1 lost the launcher of node 0"));
  head.wait_for("; the other 2 ranks go on\n");
  // Newcomers as before.
  Command third(kept(port, {"--nnodes", "1:3"}));
  third.wait_for("began in generation 3 as 2 of 3");
  head.send(SIGINT);
  for (Command* command : {&head, &second, &third}) EXPECT_EQ(command->finish().exit_code, 128 + SIGINT);
  EXPECT_EQ(first.finish().exit_code, 137);
  for (Command* command : {&second, &third}) EXPECT_TRUE(command->nothing_left());
}

TEST(LaunchRendezvous, ItEndsWithTheCodeOfTheJob) {
  const int port = free_port();
  Command head(leader(port, "2"));
  head.wait_for("leads");
  const std::string script = "[ $RANK = 0 ] && exit 21; exec sleep 100";
  Command first(led(port, "2", script)), second(led(port, "2", script));
  EXPECT_EQ(first.finish().exit_code, 21);
  EXPECT_EQ(second.finish().exit_code, 21);
  const Result result = head.finish();
  EXPECT_EQ(result.exit_code, 21);
  EXPECT_THAT(result.err, HasSubstr("[run] rank 0 of 2 on node 0 (" + launch::host_name() + ") (pid "));
}

TEST(LaunchRendezvous, WithTheLastNodeTheJobEnds) {
  const int port = free_port();
  Command head(leader(port, "1:2", {"--max-restarts", "3", "--last-call", "0.3"}));
  head.wait_for("leads");
  Command node(led(port, "1:2", "echo ready; exec sleep 100"));
  node.wait_for("ready");
  node.send(SIGKILL);
  const Result result = head.finish();
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.err, HasSubstr("[run] lost the launcher of node 0 (" + launch::host_name() + "); its 1 ranks "));
}

TEST(LaunchRendezvous, CtrlCEndsTheJobOrTheWaiting) {
  for (const bool has_begun : {false, true}) {
    const int port = free_port();
    Command head(leader(port, "2"));
    head.wait_for("leads the job");
    Command first(led(port, "2", "echo ready; exec sleep 100"));
    std::unique_ptr<Command> second;
    if (has_begun) {
      second = std::make_unique<Command>(led(port, "2", "echo ready; exec sleep 100"));
      first.wait_for("ready");
      second->wait_for("ready");
    } else {
      head.wait_for("[run] waiting at " + address(port) + " for 1 more of 2 nodes\n");
    }
    head.send(SIGINT);
    const Result result = head.finish();
    EXPECT_EQ(result.exit_code, 130);
    EXPECT_THAT(result.err, HasSubstr("[run] the job got SIGINT on the leader (" + launch::host_name() + ")" +
                                      (has_begun ? "; its 2 ranks are ended\n" : " before any rank started\n")));
    EXPECT_EQ(first.finish().exit_code, 130);
    if (second != nullptr) {
      EXPECT_EQ(second->finish().exit_code, 130);
    }
    EXPECT_TRUE(first.nothing_left());
  }
}

TEST(LaunchRendezvous, MistakesAreTold) {
  const std::string token = "SERRIED_TOKEN=" + std::string(64, 'a');
  const std::vector<std::pair<std::vector<std::string>, std::string>> cases = {
      {{"--nnodes", "2"}, "[run] --listen is missing\n  fix: pass --listen host:port, where host is this machine\n"},
      {{"--listen", "head", "--nnodes", "2"},
       "[run] --listen \"head\" is not host:port\n  fix: for example --listen node0:29500\n"},
      {{"--listen", "head:29500"},
       "[run] --nnodes is 1, and one node needs no leader\n  fix: pass the --nnodes of the job, for example 2 or "
       "2:4\n"},
      {{"--listen", "head:29500", "--nnodes", "4:2"}, "[run] --nnodes is 4:2\n  fix: pass min:max, the smaller"},
      {{"--listen", "10.255.255.1:9", "--nnodes", "2"},
       "[run] --nnodes is 2 and there is no token: whoever reaches 10.255.255.1:9 could join the job\n  fix: "},
      {{"--listen", "127.0.0.1:9", "--nnodes", "2", "--max-restarts", "-1"}, "[run] --max-restarts is -1\n  fix: "},
      {{"--listen", "127.0.0.1:9", "--nnodes", "2", "--lost-after", "1"}, "[run] --lost-after is 1 s\n  fix: "},
      {{"--listn", "127.0.0.1:9"},
       "[serried] there is no option --listn; did you mean --listen?\n  fix: serried rendezvous --help lists the "
       "options\n"},
      {{"--listen", "127.0.0.1:9", "--nnodes", "2", "./train"}, "[serried] \"./train\" was not expected\n  fix: "},
  };
  for (auto [arguments, text] : cases) {
    arguments.insert(arguments.begin(), "rendezvous");
    const Result result = serried(arguments);
    EXPECT_EQ(result.exit_code, 2) << text;
    EXPECT_THAT(result.err, StartsWith(text));
  }
  const Result elsewhere = serried({"rendezvous", "--listen", "192.0.2.1:29500", "--nnodes", "2"}, {token});
  EXPECT_EQ(elsewhere.exit_code, 1);
  EXPECT_THAT(elsewhere.err, StartsWith("[run] cannot listen on 192.0.2.1:29500: "));
  const Result insecure = serried({"rendezvous", "--listen", "192.0.2.1:29500", "--nnodes", "2", "--insecure"});
  EXPECT_THAT(insecure.err, StartsWith("[run] --insecure: whoever reaches 192.0.2.1:29500 can join this job\n"));
  const Result help = serried({"rendezvous", "--help"});
  EXPECT_EQ(help.exit_code, 0);
  EXPECT_THAT(help.out, AllOf(HasSubstr("--listen"), HasSubstr("--keep-going"),
                              HasSubstr("serried run --nnodes 2:4 --rendezvous head:29500")));
}

TEST(LaunchRendezvous, NobodyComesInTime) {
  const int port = free_port();
  Command head(leader(port, "2", {"--join-timeout", "0.4"}));
  head.wait_for("leads");
  const Result node = serried(led(port, "2", "true"));
  const Result result = head.finish();
  const std::string what = "1 more of 2 nodes did not join at " + address(port) + " within 0.4 s\n  fix: start the ";
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.err, HasSubstr("[run] " + what));
  EXPECT_EQ(node.exit_code, 1);
  EXPECT_THAT(node.err, HasSubstr("[run] " + what));
}

TEST(LaunchRendezvous, NodesThatDoNotFitAreRefused) {
  const int port = free_port();
  Command head(leader(port, "2"));
  head.wait_for("leads");
  const std::string refuses = "[run] the leader at " + address(port) + " refuses: this node was started with ";
  const std::vector<std::pair<std::vector<std::string>, std::string>> cases = {
      {led(port, "3", "true"), "--nnodes 3, the leader with --nnodes 2\n  fix: "},
      {led(port, "2", "true", {"--keep-going"}),
       "--keep-going, the leader without\n  fix: pass it to serried rendezvous; nodes may leave it out\n"},
      {led(port, "2", "true", {"--max-restarts", "3"}),
       "--max-restarts 3, the leader with --max-restarts 0\n  fix: pass it to serried rendezvous; nodes may leave it "
       "out\n"},
  };
  for (const auto& [arguments, text] : cases) {
    const Result result = serried(arguments);
    EXPECT_EQ(result.exit_code, 2);
    EXPECT_EQ(result.err.find(refuses + text), 0u) << result.err;
  }
  Command first(led(port, "2", "true")), second(led(port, "2", "true"));
  EXPECT_EQ(first.finish().exit_code, 0);
  EXPECT_EQ(second.finish().exit_code, 0);
  EXPECT_EQ(head.finish().exit_code, 0);
}

TEST(LaunchRendezvous, ItsTokenIsTheNodes) {
  const int port = free_port();
  Command head(leader(port, "2"), {"SERRIED_TOKEN=" + std::string(64, 'a')});
  head.wait_for("leads");
  const Result other = serried(led(port, "2", "true"), {"SERRIED_TOKEN=" + std::string(64, 'b')});
  EXPECT_EQ(other.exit_code, 2);
  EXPECT_THAT(other.err, HasSubstr(" has another token than this node\n  fix: "));
  Command first(led(port, "2", "true"), {"SERRIED_TOKEN=" + std::string(64, 'a')});
  Command second(led(port, "2", "true"), {"SERRIED_TOKEN=" + std::string(64, 'a')});
  EXPECT_EQ(first.finish().exit_code, 0);
  EXPECT_EQ(second.finish().exit_code, 0);
  EXPECT_EQ(head.finish().exit_code, 0);
}

TEST(LaunchRendezvous, ALeaderThatIsLostIsNamed) {
  const int port = free_port();
  Command head(leader(port, "2"));
  head.wait_for("leads");
  Command first(led(port, "2", "echo ready; exec sleep 100")), second(led(port, "2", "echo ready; exec sleep 100"));
  first.wait_for("ready");
  second.wait_for("ready");
  head.send(SIGKILL);
  for (Command* command : {&first, &second}) {
    const Result result = command->finish();
    EXPECT_EQ(result.exit_code, 1);
    EXPECT_THAT(result.err, HasSubstr("[run] lost the leader (127.0.0.1)"));
    EXPECT_TRUE(command->nothing_left());
  }
}

}  // namespace
}  // namespace serried::testing
