// Training with Elastic on two hosts, of which one loses a rank, is lost, or comes later.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <signal.h>

#include <cstdlib>
#include <functional>

#include "tests/hosts/hosts.h"

namespace serried::testing {
namespace {

using ::testing::HasSubstr;

/// Two ranks of `nodes` hosts, on `host`; `arguments` are the worker's.
Command start(const Hosts& hosts, int host, const std::string& nodes, const std::vector<std::string>& arguments) {
  std::vector<std::string> words = {"run", "--keep-going",        "--nnodes", nodes, "--rendezvous", "h0:29500", "-n",
                                    "2",   SERRIED_ELASTIC_WORKER};
  words.insert(words.end(), arguments.begin(), arguments.end());
  return hosts.serried(host, words, {"SERRIED_TOKEN=" + std::string(64, 'a')});
}

/// Both ranks of a host have ended, with what a plain loop with as many ranks per step gives.
void expect_trained(const Result& result, int num_ranks) {
  EXPECT_EQ(result.exit_code, 0) << result.out << result.err;
  EXPECT_EQ(count_of(result.out, "equals the plain loop after "), num_ranks) << result.out << result.err;
}

TEST(ElasticOverHosts, ThoseLeftGoOnWhenARankOfAnotherHostIsKilled) {
  const Hosts hosts(2);
  Command second = start(hosts, 1, "2", {"8", "1", "3:3:bucket:0"});
  Command first = start(hosts, 0, "2", {"8", "1", "3:3:bucket:0"});
  const Result a = first.finish();
  const Result b = second.finish();
  expect_trained(a, count_of(a.out, " after 4 4 4 3 3 3 3 3 ;"));
  expect_trained(b, count_of(b.out, " after 4 4 4 3 3 3 3 3 ;"));
  EXPECT_EQ(count_of(a.out + b.out, " after 4 4 4 3 3 3 3 3 ;"), 3) << a.out << b.out;
}

/// Host 1 is lost by `fault` in the middle of the training, and the two ranks of host 0 end it.
void expect_goes_on_without(const std::function<void(const Hosts&)>& fault, const std::string& said) {
  const Hosts hosts(2);
  Command second = start(hosts, 1, "1:2", {"800", "1"});
  Command first = start(hosts, 0, "1:2", {"800", "1"});
  first.wait_for("done 200\n");
  fault(hosts);
  const Result result = first.finish();
  expect_trained(result, 2);
  EXPECT_EQ(count_of(result.out, " 4 2 "), 2) << "of each rank's list of ranks per step";
  EXPECT_THAT(result.err, HasSubstr(said));
}

TEST(ElasticOverHosts, ThoseLeftGoOnWhenAHostIsKilled) {
  expect_goes_on_without([](const Hosts& hosts) { hosts.kill(1); },
                         "lost the launcher of node 1 (h1); the other 2 ranks go on");
}

TEST(ElasticOverHosts, ThoseLeftGoOnWhenAHostIsOff) {
  expect_goes_on_without([](const Hosts& hosts) { hosts.off(1); },
                         "so it is frozen, off or cut off; the other 2 ranks go on");
}

TEST(ElasticOverHosts, ThoseLeftGoOnWhenAHostIsFrozen) {
  expect_goes_on_without([](const Hosts& hosts) { hosts.freeze(1); },
                         "so it is frozen, off or cut off; the other 2 ranks go on");
}

// Where the leader is on a machine that stays: the store of the job, which is the leader's, outlives the host too.
void expect_goes_on_without_rank_0(const std::function<void(const Hosts&)>& fault, const std::string& said) {
  const Hosts hosts(3);
  const std::vector<std::string> token = {"SERRIED_TOKEN=" + std::string(64, 'a')};
  Command head = hosts.serried(0, {"rendezvous", "--listen", "h0:29500", "--nnodes", "1:2", "--keep-going"}, token);
  const auto start_on = [&](int host, std::vector<std::string> words) {
    words.insert(words.begin(), {"run", "--nnodes", "1:2", "--rendezvous", "h0:29500", "-n", "2"});
    words.insert(words.end(), {SERRIED_ELASTIC_WORKER, "800", "1"});
    return hosts.serried(host, words, token);
  };
  Command first = start_on(1, {});
  Command second = start_on(2, {"--node-rank", "1"});
  first.wait_for("done 200\n");  // rank 0 says it
  fault(hosts);
  const Result result = second.finish();
  expect_trained(result, 2);
  EXPECT_EQ(count_of(result.out, " 4 2 "), 2) << "of each rank's list of ranks per step";
  EXPECT_THAT(result.err, HasSubstr("[run] lost the launcher of node 0 (h1)" + said));
  const Result end = head.finish();
  EXPECT_EQ(end.exit_code, 0) << end.err;
  EXPECT_THAT(end.err, HasSubstr("[run] lost the launcher of node 0 (h1)" + said));
}

TEST(ElasticOverHosts, ThoseLeftGoOnWhenTheHostOfRankZeroIsKilled) {
  expect_goes_on_without_rank_0([](const Hosts& hosts) { hosts.kill(1); }, "; the other 2 ranks go on");
}

TEST(ElasticOverHosts, ThoseLeftGoOnWhenTheHostOfRankZeroIsOff) {
  expect_goes_on_without_rank_0([](const Hosts& hosts) { hosts.off(1); },
                                ": it said nothing for 10 s, so it is frozen, off or cut off; the other 2 ranks go on");
}

// Until a file is there, so that there are steps enough.
struct Until {
  explicit Until(const Hosts& hosts) : hosts(hosts) {}
  Command start_on(int host, std::vector<std::string> words) const {
    words.insert(words.begin(), {"run", "--nnodes", "2", "--rendezvous", "h0:29500", "-n", "2", "--keep-going"});
    words.insert(words.end(), {SERRIED_ELASTIC_WORKER, "1000000", "1", "until:" + folder.path() + "/end"});
    return hosts.serried(host, words, {"SERRIED_TOKEN=" + std::string(64, 'a')});
  }
  Command lead() const {
    return hosts.serried(0, {"rendezvous", "--listen", "h0:29500", "--nnodes", "2", "--keep-going"},
                         {"SERRIED_TOKEN=" + std::string(64, 'a')});
  }
  static void wait_for_steps(Command& with_rank_0) {
    const size_t at = with_rank_0.so_far().rfind("done ");
    const int newest = at == std::string::npos ? 0 : std::atoi(with_rank_0.so_far().c_str() + at + 5);
    with_rank_0.wait_for("done " + std::to_string(newest + 20) + "\n");
  }
  void end() const { write_file(folder.path() + "/end", ""); }

  const Hosts& hosts;
  TemporaryFolder folder;
};

TEST(ElasticOverHosts, RanksStepOnWithoutALeaderAndTheNextOneLeadsThem) {
  const Hosts hosts(3);
  const Until until(hosts);
  Command lost = until.lead();
  Command first = until.start_on(1, {});
  Command second = until.start_on(2, {"--node-rank", "1"});
  until.wait_for_steps(first);
  lost.send(SIGKILL);
  for (Command* each : {&first, &second}) each->wait_for("[run] lost the leader (h0); the ranks here go on");
  until.wait_for_steps(first);
  Command next = until.lead();
  for (Command* each : {&first, &second}) each->wait_for("[run] a leader is at h0:29500 again\n");
  next.wait_for("[run] a leader is at its place again: 4 ranks\n");
  until.wait_for_steps(first);
  until.end();
  for (Command* each : {&first, &second}) {
    const Result result = each->finish();
    expect_trained(result, 2);
    EXPECT_EQ(count_of(result.out, " 3 "), 0) << "a step without one of them";
  }
  EXPECT_EQ(next.finish().exit_code, 0);
}

// The leader with it: the others wait with their state for the launcher that is started there again.
TEST(ElasticOverHosts, ThoseLeftGiveTheirStateToTheHostOfRankZeroThatComesAgain) {
  const Hosts hosts(2);
  const Until until(hosts);
  Command second = until.start_on(1, {});
  Command first = until.start_on(0, {});
  until.wait_for_steps(first);
  hosts.kill(0);
  second.wait_for(
      "[run] lost the launcher of node 0 (h0); the ranks here wait, for up to 300 s, until a leader is at "
      "h0:29500\n");
  Command again = until.start_on(0, {});
  second.wait_for("[run] the job grows by h0: 4 ranks\n");
  second.wait_for("done ");  // rank 0 is there now
  until.wait_for_steps(second);
  until.end();
  expect_trained(again.finish(), 2);
  expect_trained(second.finish(), 2);
}

TEST(ElasticOverHosts, AHostThatComesLaterTakesTheState) {
  const Hosts hosts(2);
  // Steps enough for it to come: the others wait for nobody.
  Command first = start(hosts, 0, "1:2", {"1500", "1"});
  first.wait_for("done 20\n");
  Command second = start(hosts, 1, "1:2", {"1500", "1"});
  const Result a = first.finish();
  const Result b = second.finish();
  expect_trained(a, 2);
  expect_trained(b, 2);
  for (const Result& each : {a, b}) EXPECT_EQ(count_of(each.out, " 2 4 "), 2);
}

}  // namespace
}  // namespace serried::testing
