// Two launchers on loopback as two nodes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <memory>

#include "serried/launch/handshake.h"
#include "serried/launch/socket.h"
#include "serried/launch/version.h"
#include "serried/launch/wire.h"
#include "tests/process/command.h"
#include "tests/support/listening.h"

namespace serried::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;

struct NodeOptions {
  int num_ranks = 1;
  int num_nodes = 2;
  std::vector<std::string> more = {};
};

std::vector<std::string> node(int port, int node_rank, const std::string& script, const NodeOptions& options = {}) {
  std::vector<std::string> arguments = {
      "--nnodes",     std::to_string(options.num_nodes),   "--node-rank", std::to_string(node_rank),
      "--rendezvous", "127.0.0.1:" + std::to_string(port), "-n",          std::to_string(options.num_ranks)};
  arguments.insert(arguments.end(), options.more.begin(), options.more.end());
  return shell(arguments, script);
}

TEST(LaunchNodes, RanksAreNumberedAcrossNodesOfDifferentSize) {
  const int port = free_port();
  const std::string script =
      "echo $RANK/$WORLD_SIZE local $LOCAL_RANK/$LOCAL_WORLD_SIZE node $GROUP_RANK $MASTER_ADDR "
      "port $MASTER_PORT id $TORCHELASTIC_RUN_ID";
  Command second(node(port, 1, script, {.num_ranks = 1}));  // comes first and waits
  Command first(node(port, 0, script, {.num_ranks = 2}));
  const Result a = first.finish();
  const Result b = second.finish();
  EXPECT_EQ(a.exit_code, 0) << a.err;
  EXPECT_EQ(b.exit_code, 0) << b.err;
  const std::string tail = b.out.substr(b.out.find(" port "));  // the same port and id everywhere
  EXPECT_EQ(b.out, "[rank 2] 2/3 local 0/1 node 1 127.0.0.1" + tail);
  EXPECT_THAT(lines_of(a.out + b.out),
              UnorderedElementsAre("[rank 0] 0/3 local 0/2 node 0 127.0.0.1" + tail.substr(0, tail.size() - 1),
                                   "[rank 1] 1/3 local 1/2 node 0 127.0.0.1" + tail.substr(0, tail.size() - 1),
                                   "[rank 2] 2/3 local 0/1 node 1 127.0.0.1" + tail.substr(0, tail.size() - 1)));
}

TEST(LaunchNodes, FailureOnOneNodeIsReportedOnBothWithTheCulpritsCode) {
  for (const int culprit : {0, 1}) {
    const int port = free_port();
    const std::string script = "[ $RANK = " + std::to_string(culprit) + " ] || exec sleep 100; echo boom >&2; exit 21";
    Command first(node(port, 0, script));
    Command second(node(port, 1, script));
    for (Command* command : {&first, &second}) {
      const Result result = command->finish();
      EXPECT_EQ(result.exit_code, 21);
      EXPECT_LT(result.seconds, 5);
      EXPECT_THAT(result.err, HasSubstr("[run] rank " + std::to_string(culprit) + " of 2 on node " +
                                        std::to_string(culprit) + " (" + launch::host_name() + ") (pid "));
      EXPECT_THAT(result.err, HasSubstr("exited with code 21\n  its last lines of stderr:\n    boom\n  fix: "));
      EXPECT_TRUE(command->nothing_left());
    }
  }
}

TEST(LaunchNodes, AllNodesRestartTogether) {
  const int port = free_port();
  TemporaryFolder folder;
  const std::string fifo = make_fifo(folder);
  const std::string script =
      "echo $RANK attempt $TORCHELASTIC_RESTART_COUNT of $TORCHELASTIC_MAX_RESTARTS\n"
      "[ $TORCHELASTIC_RESTART_COUNT = 2 ] && exit 0\n"
      "if [ $RANK = 1 ]; then read x < " +
      fifo + "; exit 3; fi; echo > " + fifo + "; exec sleep 100";
  Command first(node(port, 0, script, {.more = {"--max-restarts", "2"}}));
  Command second(node(port, 1, script));
  const Result a = first.finish();
  const Result b = second.finish();
  EXPECT_EQ(a.exit_code, 0) << a.err;
  EXPECT_EQ(b.exit_code, 0) << b.err;
  EXPECT_EQ(a.out, "[rank 0] 0 attempt 0 of 2\n[rank 0] 0 attempt 1 of 2\n[rank 0] 0 attempt 2 of 2\n");
  EXPECT_EQ(b.out, "[rank 1] 1 attempt 0 of 2\n[rank 1] 1 attempt 1 of 2\n[rank 1] 1 attempt 2 of 2\n");
}

TEST(LaunchNodes, LauncherThatVanishesEndsTheJobOnTheOther) {
  for (const int victim : {0, 1}) {
    const int port = free_port();
    Command first(node(port, 0, "echo ready; exec sleep 100"));
    Command second(node(port, 1, "echo ready; exec sleep 100"));
    first.wait_for("ready");
    second.wait_for("ready");
    Command& killed = victim == 0 ? first : second;
    Command& survivor = victim == 0 ? second : first;
    killed.send(SIGKILL);
    const Result result = survivor.finish();
    EXPECT_EQ(result.exit_code, 1);
    EXPECT_THAT(result.err, HasSubstr("[run] lost the launcher of node " + std::to_string(victim) + " ("));
    EXPECT_EQ(killed.finish().exit_code, 137);
    EXPECT_TRUE(survivor.nothing_left());
    EXPECT_TRUE(killed.nothing_left());
  }
}

TEST(LaunchNodes, CtrlCOnOneNodeEndsBoth) {
  const int port = free_port();
  Command first(node(port, 0, "echo ready; exec sleep 100"));
  Command second(node(port, 1, "echo ready; exec sleep 100"));
  first.wait_for("ready");
  second.wait_for("ready");
  second.send(SIGINT);
  for (Command* command : {&first, &second}) {
    const Result result = command->finish();
    EXPECT_EQ(result.exit_code, 130);
    EXPECT_THAT(result.err, HasSubstr("[run] the job got SIGINT on node 1 ("));
    EXPECT_TRUE(command->nothing_left());
  }
}

TEST(LaunchNodes, CtrlCWhileWaitingForOthersEndsAtOnce) {
  const int port = free_port();
  Command first(node(port, 0, "true"));
  first.wait_for("waiting at 127.0.0.1:" + std::to_string(port) + " for node-rank 1 of 2 nodes");
  first.send(SIGINT);
  const Result a = first.finish();
  EXPECT_EQ(a.exit_code, 130);
  EXPECT_THAT(a.err,
              HasSubstr("[run] the job got SIGINT on node 0 (" + launch::host_name() + ") before any rank started\n"));
  Command second(node(port, 1, "true"));
  second.wait_for("waiting for node 0");
  second.send(SIGTERM);
  EXPECT_EQ(second.finish().exit_code, 143);
}

std::string tries_in(const std::string& text) {
  const size_t begin = text.find("tried ") + 6;
  const std::string tries = text.substr(begin, text.find(' ', begin) - begin);
  EXPECT_GT(std::stoi(tries), 1);
  return tries;
}

TEST(LaunchNodes, UnreachableRendezvousIsToldWithinTheTimeout) {
  const int port = free_port();
  const Result result = serried(node(port, 1, "true", {.more = {"--join-timeout", "0.3"}}));
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_LT(result.seconds, 3);
  EXPECT_EQ(result.err, "[run] " + launch::host_name() + " cannot reach node 0's launcher at 127.0.0.1:" +
                            std::to_string(port) + " within 0.3 s: tried " + tries_in(result.err) +
                            " times, at last: Connection refused\n  fix: start the same command, or serried "
                            "rendezvous, on that host, or check "
                            "--rendezvous, the firewall, --join-timeout\n");
}

TEST(LaunchNodes, SomethingElseAtTheRendezvousIsTold) {
  const launch::Fd silent = launch::listen_on({"127.0.0.1", 0});
  const Result result = serried(node(launch::port_of(silent), 1, "true", {.more = {"--join-timeout", "0.3"}}));
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.err, HasSubstr("something answers there, but it is not node 0's launcher"));
}

TEST(LaunchNodes, MissingNodeIsNamedOnAllThatCame) {
  const int port = free_port();
  Command second(node(port, 1, "true", {.num_nodes = 3}));
  Command first(node(port, 0, "true", {.num_nodes = 3, .more = {"--join-timeout", "1"}}));
  for (Command* command : {&first, &second}) {
    const Result result = command->finish();
    EXPECT_EQ(result.exit_code, 1);
    EXPECT_THAT(result.err, HasSubstr("[run] node-rank 2 of 3 nodes did not join at 127.0.0.1:" + std::to_string(port) +
                                      " within 1 s\n  fix: "));
  }
}

TEST(LaunchNodes, SecondLauncherOfTheSameNodeRankIsRefusedAndTheJobGoesOn) {
  const int port = free_port();
  Command first(node(port, 0, "echo ready; trap 'exit 0' USR1; while :; do sleep 0.01; done"));
  Command second(node(port, 1, "echo ready; trap 'exit 0' USR1; while :; do sleep 0.01; done"));
  first.wait_for("ready");
  second.wait_for("ready");
  const Result late = serried(node(port, 1, "echo never"));
  EXPECT_EQ(late.exit_code, 2);
  EXPECT_EQ(late.err,
            "[run] node 0 at 127.0.0.1:" + std::to_string(port) + " refuses: --node-rank 1 is taken by " +
                launch::host_name() +
                "\n  fix: give each node its own --node-rank, or none of them one, and all the same --nnodes; a node "
                "too many is not needed\n");
  first.wait_for("refused a launcher");
  first.send(SIGUSR1);
  second.send(SIGUSR1);
  EXPECT_EQ(first.finish().exit_code, 0);
  EXPECT_EQ(second.finish().exit_code, 0);
}

TEST(LaunchNodes, DifferentNodeCountsAreRefused) {
  const int port = free_port();
  Command first(node(port, 0, "true"));
  const Result other = serried(node(port, 1, "true", {.num_nodes = 3}));
  EXPECT_EQ(other.exit_code, 2);
  EXPECT_THAT(other.err, HasSubstr("this node was started with --nnodes 3, node 0 with --nnodes 2\n  fix: "));
}

TEST(LaunchNodes, ALauncherThatAnotherJobHasLeftIsRefused) {
  const int port = free_port();
  Command left(node(port, 1, "echo of A"));
  Command first(node(port, 0, "echo of B"));
  const Result refused = left.finish();
  EXPECT_EQ(refused.exit_code, 2);
  EXPECT_EQ(refused.out, "");
  const std::string why = "this node was started to run \"sh -c echo of A\", node 0 \"sh -c echo of B\"\n";
  EXPECT_THAT(
      refused.err,
      HasSubstr("[run] node 0 at 127.0.0.1:" + std::to_string(port) + " refuses: " + why +
                "  fix: end the launchers of the job that is over, and give each job a port of its own; what differs "
                "between the nodes of one job can be in a script, which all of them run\n"));
  first.wait_for("[run] refused a launcher on " + launch::host_name() + ": " + why);
  Command second(node(port, 1, "echo of B"));
  EXPECT_EQ(first.finish().exit_code, 0);
  EXPECT_EQ(second.finish().out, "[rank 1] of B\n");
}

TEST(LaunchNodes, PortInUseIsTold) {
  const launch::Fd taken = launch::listen_on({"127.0.0.1", 0});
  const std::string port = std::to_string(launch::port_of(taken));
  const Result result = serried(node(launch::port_of(taken), 0, "true"));
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.err, HasSubstr("[run] port " + port + " is in use on " + launch::host_name() + "\n  fix: "));
}

TEST(LaunchNodes, ListenAtTheAddressTheyAreGiven) {
  for (const char* host : {"127.0.0.1", "127.0.0.2", "localhost", "0.0.0.0"}) {
    const launch::Fd socket = launch::listen_on({host, 0});
    const std::string wanted = std::string(host) == "localhost" ? "127.0.0.1" : host;
    EXPECT_EQ(listening_sockets()[launch::port_of(socket)], wanted);
  }
}

TEST(LaunchNodes, AnAddressOfAnotherMachineIsRefused) {
  const Result result =
      serried(shell({"--nnodes", "2", "--node-rank", "0", "--rendezvous", "192.0.2.1:29500"}, "echo started"),
              {"SERRIED_TOKEN=" + std::string(64, 'a')});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_EQ(result.out, "");
  EXPECT_EQ(
      result.err,
      "[run] cannot listen on 192.0.2.1:29500: 192.0.2.1 is no address of this machine\n"
      "  fix: pass an address of this machine to --rendezvous; behind NAT or in a container pass 0.0.0.0:29500 on "
      "node 0 and the outside address on the others\n");
}

TEST(LaunchNodes, ShareOneSecret) {
  const int port = free_port();
  const std::string script = "echo secret $SERRIED_JOB_SECRET";
  Command first(node(port, 0, script));
  Command second(node(port, 1, script));
  const std::string a = first.finish().out;
  const std::string b = second.finish().out;
  EXPECT_EQ(a.substr(a.find("secret")), b.substr(b.find("secret")));
  EXPECT_EQ(a.size(), std::string("[rank 0] secret \n").size() + 64);
}

TEST(LaunchNodes, StrangersAtTheRendezvousDoNotDisturb) {
  const int port = free_port();
  Command first(node(port, 0, "echo ok"));
  Command stranger({"run", "sh", "-c",
                    "until printf 'GET / HTTP/1.0\\r\\n\\r\\n' | timeout 1 bash -c 'exec 3<>/dev/tcp/127.0.0.1/" +
                        std::to_string(port) + "; cat >&3'; do sleep 0.02; done"});
  EXPECT_EQ(stranger.finish().exit_code, 0);
  Command second(node(port, 1, "echo ok"));
  EXPECT_EQ(first.finish().exit_code, 0);
  EXPECT_EQ(second.finish().exit_code, 0);
}

TEST(LaunchNodes, ProgramMissingOnOneNodeEndsBoth) {
  const int port = free_port();
  TemporaryFolder folder;
  const auto with_program = [&](int node_rank, const std::string& interpreter) {
    const std::string place = folder.path() + "/" + std::to_string(node_rank);
    std::filesystem::create_directory(place);
    write_file(place + "/script", "#!" + interpreter + "\nexec sleep 100\n");
    std::filesystem::permissions(place + "/script", std::filesystem::perms::owner_all);
    std::vector<std::string> arguments = node(port, node_rank, "");
    arguments.resize(arguments.size() - 3);
    arguments.push_back(place + "/script");
    return arguments;
  };
  Command first(with_program(0, "/bin/sh"));
  Command second(with_program(1, "/not/there"));
  for (Command* command : {&first, &second}) {
    const Result result = command->finish();
    EXPECT_EQ(result.exit_code, 127);
    EXPECT_THAT(result.err, HasSubstr("its interpreter or loader does not exist\n  fix: "));
    EXPECT_TRUE(command->nothing_left());
  }
}

std::string token_of(char letter) {
  return "SERRIED_TOKEN=" + std::string(64, letter);
}

TEST(LaunchNodes, NodesWithTheSameTokenMeetAndRanksDoNotSeeIt) {
  const int port = free_port();
  const std::string script = "env | grep -c TOKEN; true";
  Command first(node(port, 0, script), {token_of('a')});
  Command second(node(port, 1, script), {token_of('a')});
  EXPECT_EQ(first.finish().out, "[rank 0] 0\n");
  EXPECT_EQ(second.finish().out, "[rank 1] 0\n");
}

TEST(LaunchNodes, ANodeWithAnotherTokenOrNoneIsRefused) {
  for (const bool has_token : {true, false}) {
    const int port = free_port();
    const std::vector<std::string> other = has_token ? std::vector{token_of('b')} : std::vector<std::string>{};
    Command first(node(port, 0, "true"), {token_of('a')});
    Command wrong(node(port, 1, "true"), other);
    const Result refused = wrong.finish();
    EXPECT_EQ(refused.exit_code, 2);
    EXPECT_EQ(refused.err, "[run] node 0 at 127.0.0.1:" + std::to_string(port) + " has another token than this node" +
                               (has_token ? "" : ", which has none") +
                               "\n  fix: set the same SERRIED_TOKEN_FILE or SERRIED_TOKEN on every node\n");
    Command right(node(port, 1, "true"), {token_of('a')});
    const Result result = first.finish();
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_EQ(right.finish().exit_code, 0);
    EXPECT_EQ(count_of(result.err, "[run] refused a connection from 127.0.0.1:"), 1) << result.err;
    EXPECT_THAT(result.err, HasSubstr(": it has another token, or none"));
  }
}

TEST(LaunchNodes, SeveralMachinesNeedATokenOrSayThatTheyHaveNone) {
  const std::vector<std::string> words = {"run", "--nnodes", "2", "--node-rank", "1", "--rendezvous", "10.255.255.1:9"};
  const auto with = [&](std::vector<std::string> more) {
    std::vector<std::string> all = words;
    all.insert(all.end(), more.begin(), more.end());
    return all;
  };
  const Result refused = serried(with({"true"}));
  EXPECT_EQ(refused.exit_code, 2);
  EXPECT_EQ(
      refused.err,
      "[run] --nnodes is 2 and there is no token: whoever reaches 10.255.255.1:9 could join the job\n  fix: serried "
      "token > FILE, chmod 600 FILE, copy it to every node and set SERRIED_TOKEN_FILE=FILE there; or pass "
      "--insecure on all of them\n");
  const Result insecure = serried(with({"--insecure", "--join-timeout", "0.1", "true"}));
  EXPECT_EQ(insecure.exit_code, 1);
  EXPECT_EQ(insecure.err.find("[run] --insecure: whoever reaches 10.255.255.1:9 can join this job\n"), 0u)
      << insecure.err;
}

TEST(LaunchNodes, TokensOfFilesAreForTheirUserAlone) {
  const TemporaryFolder folder;
  const std::string file = folder.path() + "/token";
  const auto error_with = [&](std::vector<std::string> environment) {
    const Result result = serried(node(1, 0, "true"), std::move(environment));
    EXPECT_EQ(result.exit_code, 2);
    return result.err;
  };
  EXPECT_EQ(error_with({"SERRIED_TOKEN_FILE=" + file}),
            "[run] SERRIED_TOKEN_FILE=" + file + " cannot be read: No such file or directory\n  fix: serried token > " +
                file + "\n");
  const Result made = serried({"token"});
  EXPECT_EQ(made.out.size(), 65u);
  EXPECT_EQ(made.out.find_first_not_of("0123456789abcdef"), 64u);
  EXPECT_NE(serried({"token"}).out, made.out);
  std::ofstream(file) << made.out;
  std::filesystem::permissions(file, std::filesystem::perms(0644));
  EXPECT_EQ(error_with({"SERRIED_TOKEN_FILE=" + file}),
            "[run] SERRIED_TOKEN_FILE=" + file + " can be read or changed by other users\n  fix: chmod 600 " + file +
                ", as the user that owns it\n");
  EXPECT_EQ(error_with({"SERRIED_TOKEN_FILE=" + folder.path()}),
            "[run] SERRIED_TOKEN_FILE=" + folder.path() + " is no file\n  fix: serried token > FILE, and pass that\n");
  EXPECT_EQ(error_with({"SERRIED_TOKEN=short"}),
            "[run] the token of SERRIED_TOKEN has 5 characters, and needs 32\n  fix: make one by: serried token\n");
  EXPECT_EQ(error_with({"SERRIED_TOKEN=short", "SERRIED_TOKEN_FILE=" + file}),
            "[run] SERRIED_TOKEN_FILE and SERRIED_TOKEN are both set\n  fix: unset one of them\n");
  std::filesystem::permissions(file, std::filesystem::perms(0600));
  const int port = free_port();
  Command first(node(port, 0, "true"), {"SERRIED_TOKEN_FILE=" + file});
  Command second(node(port, 1, "true"), {"SERRIED_TOKEN=" + made.out.substr(0, 64)});
  EXPECT_EQ(first.finish().exit_code, 0);
  EXPECT_EQ(second.finish().exit_code, 0);
}

std::vector<std::string> any_node(int port, const std::string& script, const NodeOptions& options = {},
                                  const std::string& nodes = "2") {
  std::vector<std::string> arguments = {
      "--nnodes", nodes, "--rendezvous", "127.0.0.1:" + std::to_string(port), "-n", std::to_string(options.num_ranks)};
  arguments.insert(arguments.end(), options.more.begin(), options.more.end());
  return shell(arguments, script);
}

TEST(LaunchNodes, TheSameCommandOnAllMakesOneOfThemNode0) {
  const int port = free_port();
  const std::string script = "echo $RANK of $WORLD_SIZE on $GROUP_RANK of $GROUP_WORLD_SIZE";
  Command first(any_node(port, script, {.num_ranks = 1}, "3"));
  first.wait_for("waiting at 127.0.0.1:" + std::to_string(port) + " for 2 more of 3 nodes; " + launch::host_name() +
                 " is node 0, since it could listen there\n");
  Command second(any_node(port, script, {.num_ranks = 2}, "3"));
  Command third(any_node(port, script, {.num_ranks = 2}, "3"));
  std::string out;
  for (Command* command : {&first, &second, &third}) {
    const Result result = command->finish();
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_TRUE(command->nothing_left());
    out += result.out;
  }
  EXPECT_THAT(lines_of(out), UnorderedElementsAre("[rank 0] 0 of 5 on 0 of 3", "[rank 1] 1 of 5 on 1 of 3",
                                                  "[rank 2] 2 of 5 on 1 of 3", "[rank 3] 3 of 5 on 2 of 3",
                                                  "[rank 4] 4 of 5 on 2 of 3"));
}

TEST(LaunchNodes, TwoThatAreToldToBeNode0AreRefused) {
  const int port = free_port();
  Command first(any_node(port, "true"));
  first.wait_for("waiting at");
  const Result other = serried(node(port, 0, "true"));
  EXPECT_EQ(other.exit_code, 1);
  EXPECT_THAT(other.err, HasSubstr("[run] port " + std::to_string(port) + " is in use on " + launch::host_name()));
  Command second(any_node(port, "true"));
  EXPECT_EQ(first.finish().exit_code, 0);
  EXPECT_EQ(second.finish().exit_code, 0);
}

/// A launcher whose words the test chooses, as far as the leader's answer.
launch::Message answer_to(int port, const launch::Message& hello) {
  const launch::Connecting made = launch::start_connecting({"127.0.0.1", port});
  launch::Handshake handshake(launch::Handshake::Side::member, "");
  launch::Handshake::State state = launch::Handshake::State::open;
  const auto wait = [&](short events) {
    pollfd fd{.fd = made.socket.get(), .events = events, .revents = 0};
    EXPECT_EQ(::poll(&fd, 1, 10'000), 1);
  };
  for (wait(POLLOUT); state == launch::Handshake::State::open; wait(POLLIN)) state = handshake.advance(made.socket);
  EXPECT_EQ(state, launch::Handshake::State::agreed);
  launch::Connection connection(launch::Fd(::dup(made.socket.get())));
  connection.send(hello);
  while (!connection.closed()) {
    for (const launch::Message& message : connection.receive()) {
      if (message[0] != "beat") return message;
    }
    wait(POLLIN);
  }
  return {};
}

TEST(LaunchNodes, ANodeWithAnotherVersionIsRefusedByBothNames) {
  const int port = free_port();
  Command first(any_node(port, "true"));
  first.wait_for("waiting at");
  const std::string refusal =
      "node7 has serried 9.9.9 for LibTorch 3.0, and node 0, " + launch::host_name() + ", " + launch::version_text();
  EXPECT_EQ(answer_to(port, {"hello", "serried 9.9.9 for LibTorch 3.0", "node7", "and what we do not know"}),
            (launch::Message{"refuse", "2", "node 0 at 127.0.0.1:" + std::to_string(port) + " refuses: " + refusal,
                             "install the same version on every node: serried --version"}));
  first.wait_for("[run] refused a launcher on node7: " + refusal + "\n");
  Command second(any_node(port, "true"));
  EXPECT_EQ(first.finish().exit_code, 0);
  EXPECT_EQ(second.finish().exit_code, 0);
}

TEST(LaunchNodes, ANodeTooManyIsToldWhoIsThere) {
  const int port = free_port();
  const TemporaryFolder folder;
  const std::string script = "echo ready; until [ -e " + folder.path() + "/go ]; do sleep 0.01; done";
  Command first(any_node(port, script));
  Command second(any_node(port, script));
  first.wait_for("ready");
  second.wait_for("ready");
  const Result late = serried(any_node(port, "echo never"));
  EXPECT_EQ(late.exit_code, 2);
  const std::string host = launch::host_name();
  EXPECT_THAT(late.err, HasSubstr("refuses: the job has all of its 2 nodes: " + host + ", " + host + "\n  fix: "));
  write_file(folder.path() + "/go", "");
  EXPECT_EQ(first.finish().exit_code, 0);
  EXPECT_EQ(second.finish().exit_code, 0);
}

// Every rank says that it runs, in which table, and stays until the third table.
constexpr const char* kUntilTheThird =
    "echo rank $RANK of $WORLD_SIZE in $TORCHELASTIC_RESTART_COUNT\n"
    "[ $TORCHELASTIC_RESTART_COUNT = 2 ] || exec sleep 100";

TEST(LaunchNodes, AJobGrowsByWhoComesAndGoesOnWithoutWhoIsLost) {
  const int port = free_port();
  const NodeOptions options{.num_ranks = 2, .more = {"--last-call", "0.2", "--max-restarts", "1"}};
  Command first(any_node(port, kUntilTheThird, options, "2:3"));
  Command second(any_node(port, kUntilTheThird, {.num_ranks = 1, .more = options.more}, "2:3"));
  first.wait_for("of 3 in 0\n", 2);
  Command third(any_node(port, kUntilTheThird, options, "2:3"));
  first.wait_for("[run] the job grows by " + launch::host_name() + "; its 3 ranks are ended to start again\n");
  first.wait_for("[run] the nodes are others: all ranks start again on 3 nodes\n");
  first.wait_for("of 5 in 1\n", 2);
  third.wait_for("of 5 in 1\n", 2);
  third.send(SIGKILL);
  const Result a = first.finish();
  const Result b = second.finish();
  EXPECT_EQ(a.exit_code, 0) << a.err;
  EXPECT_EQ(b.exit_code, 0) << b.err;
  EXPECT_EQ(count_of(a.out + b.out, "of 3 in 2\n"), 3) << a.out << b.out;
  EXPECT_THAT(a.err, HasSubstr("[run] lost the launcher of node 2 (" + launch::host_name() +
                               "); its 5 ranks are ended\n[run] restart 1 of 1: all ranks start again on 2 nodes\n"));
  EXPECT_EQ(third.finish().exit_code, 137);
  for (Command* command : {&first, &second, &third}) EXPECT_TRUE(command->nothing_left());
}

// What ranks start is known by their node's number, which changes when a node before it is lost.
TEST(LaunchNodes, NothingIsLeftOfANodeThatGotAnotherNumber) {
  const int port = free_port();
  const NodeOptions options{.more = {"--last-call", "0.5", "--max-restarts", "1"}};
  const std::string script = "setsid sleep 1000 & echo node $GROUP_RANK in $TORCHELASTIC_RESTART_COUNT; exec sleep 100";
  std::vector<std::unique_ptr<Command>> nodes;
  for (const char* rank : {"0", "1", "2"}) {
    NodeOptions one = options;
    one.more.insert(one.more.end(), {"--node-rank", rank});
    nodes.push_back(std::make_unique<Command>(any_node(port, script, one, "1:3")));
  }
  for (const auto& command : nodes) command->wait_for("in 0\n");
  nodes[1]->send(SIGKILL);
  nodes[2]->wait_for("node 1 in 1\n");
  nodes[2]->send(SIGKILL);
  EXPECT_TRUE(nodes[2]->nothing_left());
  EXPECT_EQ(nodes[0]->finish().exit_code, 1);
  for (const auto& command : nodes) EXPECT_TRUE(command->nothing_left());
}

TEST(LaunchNodes, AJobBelowItsLeastEndsEvenIfItMayRestart) {
  const int port = free_port();
  const NodeOptions options{.more = {"--last-call", "0.1", "--max-restarts", "3"}};
  NodeOptions of_first = options, of_second = options;
  of_first.more.insert(of_first.more.end(), {"--node-rank", "0"});
  of_second.more.insert(of_second.more.end(), {"--node-rank", "1"});
  Command first(any_node(port, "echo ready; exec sleep 100", of_first, "2:3"));
  Command second(any_node(port, "echo ready; exec sleep 100", of_second, "2:3"));
  first.wait_for("ready");
  second.send(SIGKILL);
  const Result result = first.finish();
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.err, HasSubstr("[run] lost the launcher of node 1 (" + launch::host_name() +
                                    "); its 2 ranks are ended\n  fix: "));
  EXPECT_EQ(second.finish().exit_code, 137);
  EXPECT_TRUE(second.nothing_left());
}

TEST(LaunchNodes, ALauncherThatSaysThatItIsStoppedIsNotLost) {
  const int port = free_port();
  const TemporaryFolder folder;
  const std::string script = "echo ready; until [ -e " + folder.path() + "/go ]; do sleep 0.01; done";
  const NodeOptions options{.more = {"--lost-after", "2"}};
  Command first(any_node(port, script, options));
  Command second(any_node(port, script, options));
  first.wait_for("ready");
  second.wait_for("ready");
  second.send(SIGTSTP);
  ::poll(nullptr, 0, 3000);  // longer than what is a loss
  second.send(SIGCONT);
  write_file(folder.path() + "/go", "");
  const Result a = first.finish();
  EXPECT_EQ(a.exit_code, 0) << a.err;
  EXPECT_EQ(second.finish().exit_code, 0);
}

TEST(LaunchNodes, ALauncherThatIsFrozenIsNamed) {
  for (const bool is_leader : {true, false}) {
    const int port = free_port();
    const NodeOptions options{.more = {"--lost-after", "2"}};
    Command first(node(port, 0, "echo ready; exec sleep 100", options));
    Command second(node(port, 1, "echo ready; exec sleep 100", options));
    first.wait_for("ready");
    second.wait_for("ready");
    Command& frozen = is_leader ? first : second;
    Command& other = is_leader ? second : first;
    frozen.send(SIGSTOP);
    const Result result = other.finish();
    EXPECT_EQ(result.exit_code, 1);
    EXPECT_THAT(result.err, HasSubstr("[run] lost the launcher of node " + std::string(is_leader ? "0" : "1")));
    EXPECT_THAT(result.err, HasSubstr("): it said nothing for 2 s, so it is frozen, off or cut off; its 2 ranks"));
    frozen.send(SIGCONT);
    const Result late = frozen.finish();
    EXPECT_EQ(late.exit_code, 1);
    EXPECT_THAT(late.err, HasSubstr(is_leader ? "[run] lost the launcher of node 1 ("
                                              : "this node was frozen or cut off: 127.0.0.1:" + std::to_string(port) +
                                                    " heard nothing from it for 2 s"));
    EXPECT_TRUE(first.nothing_left());
    EXPECT_TRUE(second.nothing_left());
  }
}

}  // namespace
}  // namespace serried::testing
