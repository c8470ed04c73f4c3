// Launchers on several hosts: who leads, who is lost, who comes back.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <poll.h>
#include <signal.h>

#include <chrono>
#include <filesystem>

#include "tests/hosts/hosts.h"

namespace serried::testing {
namespace {

using ::testing::HasSubstr;

/// The same command for every host; the job has a rank on each that says "ready" and waits.
Command start_waiting(const Hosts& hosts, int host, const std::string& nodes,
                      const std::vector<std::string>& more = {}) {
  std::vector<std::string> words = {"run", "--nnodes", nodes, "--rendezvous", "h0:29500", "--last-call", "0.3"};
  words.insert(words.end(), more.begin(), more.end());
  words.insert(words.end(), {"sh", "-c", "echo ready $RANK of $WORLD_SIZE; exec sleep 100"});
  return hosts.serried(host, words, {"SERRIED_TOKEN=" + std::string(64, 'a')});
}

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

TEST(JobOverHosts, TheHostThatTheRendezvousNamesLeads) {
  const Hosts hosts(3, {.trap = true});
  Command second = start_waiting(hosts, 2, "3");
  Command third = start_waiting(hosts, 1, "3");
  second.wait_for("[run] waiting for node 0 at h0:29500 (10.77.0.1) (Connection refused)");
  Command first = start_waiting(hosts, 0, "3");
  first.wait_for("ready 0 of 3");
  second.wait_for("of 3");
  third.wait_for("of 3");
}

// Of programs that call c10d themselves: where rank 0 is, which is not where the leader is.
TEST(JobOverHosts, WithALeaderWithoutRanksTheMasterIsTheHostOfRankZero) {
  const Hosts hosts(3, {.trap = true});
  const std::vector<std::string> token = {"SERRIED_TOKEN=" + std::string(64, 'a')};
  Command head = hosts.serried(0, {"rendezvous", "--listen", "h0:29500", "--nnodes", "2"}, token);
  head.wait_for("[run] h0 leads the job that meets at h0:29500, for --nnodes 2\n");
  const auto start = [&](int host, std::vector<std::string> words) {
    words.insert(words.begin(), {"run", "--nnodes", "2", "--rendezvous", "h0:29500"});
    words.insert(words.end(), {"sh", "-c", "echo $RANK meets at $MASTER_ADDR:$MASTER_PORT"});
    return hosts.serried(host, words, token);
  };
  Command second = start(1, {"--node-rank", "1"});
  Command first = start(2, {});
  const Result a = first.finish(), b = second.finish();
  EXPECT_THAT(a.out, HasSubstr("[rank 0] 0 meets at " + hosts.address(2) + ":")) << a.err;
  const std::string place = a.out.substr(a.out.find("meets"));
  EXPECT_EQ(b.out, "[rank 1] 1 " + place) << b.err;
  EXPECT_EQ(head.finish().exit_code, 0);
}

TEST(JobOverHosts, AHostThatReachesNobodyNamesBoth) {
  const Hosts hosts(2);
  Command first = start_waiting(hosts, 0, "2");
  hosts.cut(0, 1);
  const Result result = start_waiting(hosts, 1, "2", {"--join-timeout", "6"}).finish();
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.err,
              HasSubstr("[run] h1 cannot reach node 0's launcher at h0:29500 (10.77.0.1) within 6 s: tried 2 "
                        "times, at last: no answer\n  fix: "));
}

TEST(JobOverHosts, ANameThatMeansEachHostItselfMakesTwoLeadersAndBothSaySo) {
  const Hosts hosts(2);
  const auto start = [&](int host) {
    return hosts.serried(host,
                         {"run", "--nnodes", "2", "--rendezvous", "localhost:29500", "--join-timeout", "0.5", "true"});
  };
  Command first = start(0), second = start(1);
  for (auto [command, name] : {std::pair(&first, "h0"), std::pair(&second, "h1")}) {
    const Result result = command->finish();
    EXPECT_EQ(result.exit_code, 1);
    EXPECT_EQ(
        result.err,
        "[run] 1 more of 2 nodes did not join at localhost:29500 within 0.5 s; " + std::string(name) +
            " is node 0, since it could listen there\n  fix: start the missing launchers, see that they reach that "
            "address, or raise --join-timeout; if another host says the same, that name means each of them itself "
            "there: pass an address\n");
  }
}

/// What one word does to a host of three, and how the two others take it.
struct Loss {
  const char* name;
  void (*word)(const Hosts&, int);
  int victim;
};

std::ostream& operator<<(std::ostream& out, const Loss& loss) {
  return out << loss.name;
}

class JobOverHostsLoses : public ::testing::TestWithParam<Loss> {};

// Of three hosts one goes without a word; the others name it within 10 s and end.
TEST_P(JobOverHostsLoses, AndNamesTheHostWithinTenSeconds) {
  const Hosts hosts(3);
  const Loss loss = GetParam();
  Command first = start_waiting(hosts, 0, "3");
  Command second = start_waiting(hosts, 1, "3");
  Command third = start_waiting(hosts, 2, "3");
  Command* all[] = {&first, &second, &third};
  for (Command* command : all) command->wait_for("of 3");
  const auto begin = std::chrono::steady_clock::now();
  loss.word(hosts, loss.victim);
  for (int host = 0; host < 3; ++host) {
    if (host == loss.victim) continue;
    const Result result = all[host]->finish();
    EXPECT_EQ(result.exit_code, 1);
    EXPECT_THAT(result.err, HasSubstr("[run] lost the launcher of node "));
    EXPECT_THAT(result.err, HasSubstr("(" + hosts.name(loss.victim) +
                                      "): it said nothing for 10 s, so it is frozen, off "
                                      "or cut off; its 3 ranks are ended\n"));
    EXPECT_GT(seconds_since(begin), 8);
    EXPECT_LT(seconds_since(begin), 20);
    EXPECT_TRUE(all[host]->nothing_left());
  }
}

void freeze(const Hosts& hosts, int host) {
  hosts.freeze(host);
}
void turn_off(const Hosts& hosts, int host) {
  hosts.off(host);
}
void cut_off(const Hosts& hosts, int host) {
  hosts.cut(host);
}

INSTANTIATE_TEST_SUITE_P(Hosts, JobOverHostsLoses,
                         ::testing::Values(Loss{"FrozenMember", freeze, 1}, Loss{"FrozenLeader", freeze, 0},
                                           Loss{"MemberOff", turn_off, 1}, Loss{"LeaderOff", turn_off, 0},
                                           Loss{"MemberCutOff", cut_off, 1}, Loss{"LeaderCutOff", cut_off, 0}),
                         [](const auto& info) { return std::string(info.param.name); });

/// Sends SIGKILL to what has that name; a rank that has said "ready" may still have to become it.
bool kill_by_name(const Command& command, const std::string& name) {
  for (int i = 0; i < 1000; ++i) {
    bool found = false;
    for (const pid_t pid : command.processes()) {
      if (read_file("/proc/" + std::to_string(pid) + "/comm") != name + "\n") continue;
      found = true;
      ::kill(pid, SIGKILL);
    }
    if (found) return true;
    ::poll(nullptr, 0, 5);
  }
  return false;
}

TEST(JobOverHosts, AKilledRankAndAKilledLauncherAreNamedAtOnce) {
  for (const bool is_launcher : {false, true}) {
    const Hosts hosts(2);
    Command first = start_waiting(hosts, 0, "2");
    Command second = start_waiting(hosts, 1, "2");
    first.wait_for("of 2");
    second.wait_for("of 2");
    const auto begin = std::chrono::steady_clock::now();
    EXPECT_TRUE(kill_by_name(second, is_launcher ? "serried" : "sleep"));
    const Result result = first.finish();
    EXPECT_LT(seconds_since(begin), 5);
    EXPECT_THAT(result.err, HasSubstr(is_launcher ? "[run] lost the launcher of node 1 (h1); its 2 ranks are ended\n"
                                                  : "[run] rank 1 of 2 on node 1 (h1) (pid "));
    EXPECT_EQ(result.exit_code, is_launcher ? 1 : 137);
    EXPECT_EQ(second.finish().exit_code, 137);
    for (const Command* command : {&first, &second}) EXPECT_TRUE(command->nothing_left());
  }
}

TEST(JobOverHosts, GoesOnWithoutAHostThatIsOffAndTakesItBack) {
  const Hosts hosts(3);
  const std::vector<std::string> more = {"--max-restarts", "1", "--lost-after", "3"};
  Command first = start_waiting(hosts, 0, "2:3", more);
  Command second = start_waiting(hosts, 1, "2:3", more);
  Command third = start_waiting(hosts, 2, "2:3", more);
  for (Command* command : {&first, &second, &third}) command->wait_for("of 3\n");
  hosts.off(1);
  first.wait_for("[run] restart 1 of 1: all ranks start again on 2 nodes\n");
  first.wait_for("ready 0 of 2\n");
  third.wait_for("ready 1 of 2\n");
  hosts.on(1);
  Command again = start_waiting(hosts, 1, "2:3", more);
  first.wait_for("[run] the job grows by h1; its 2 ranks are ended to start again\n");
  first.wait_for("[run] the nodes are others: all ranks start again on 3 nodes\n");
  again.wait_for("of 3\n");
  first.wait_for("ready 0 of 3\n", 2);
}

// What was cut off finds its generation over, and ends its ranks by itself.
TEST(JobOverHosts, WhoWasFrozenOrCutOffEndsItsRanks) {
  const Hosts hosts(2);
  const std::vector<std::string> more = {"--lost-after", "2"};
  Command first = start_waiting(hosts, 0, "2", more);
  Command second = start_waiting(hosts, 1, "2", more);
  first.wait_for("of 2");
  second.wait_for("of 2");
  hosts.freeze(1);
  EXPECT_THAT(first.finish().err, HasSubstr("(h1): it said nothing for 2 s"));
  hosts.thaw(1);
  const Result thawed = second.finish();
  EXPECT_EQ(thawed.exit_code, 1);
  EXPECT_THAT(thawed.err, HasSubstr("this node was frozen or cut off: h0:29500 heard nothing from it for 2 s"));
  EXPECT_TRUE(second.nothing_left());
}

// A script in the place of ssh, since no sshd runs in these hosts.
TEST(JobOverHosts, OneCommandStartsThemAllAndNamesTheOneThatGoes) {
  const Hosts hosts(3);
  const TemporaryFolder folder;
  const std::string ssh = folder.path() + "/ssh";
  write_file(ssh, "#!/bin/sh\nshift 2; host=${1#h}; shift\nexec " SERRIED_HOSTS_SCRIPT " run $host sh -c \"$*\"\n");
  std::filesystem::permissions(ssh, std::filesystem::perms::owner_all);
  Command command({"run", "--hosts", "h2:2,h0,h1", "--ssh", ssh, "--lost-after", "3", "sh", "-c",
                   "echo rank $RANK of $WORLD_SIZE on $(hostname); exec sleep 100"},
                  {"SERRIED_HOSTS=" + std::to_string(hosts.keeper())});
  for (const char* line :
       {"rank 0 of 4 on h2\n", "rank 1 of 4 on h2\n", "rank 2 of 4 on h0\n", "rank 3 of 4 on h1\n"}) {
    command.wait_for(line);
  }
  hosts.off(1);
  const Result result = command.finish();
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.err, HasSubstr("[run] lost the launcher of node 2 (h1): it said nothing for 3 s"));
  EXPECT_TRUE(command.nothing_left());
}

}  // namespace
}  // namespace serried::testing
