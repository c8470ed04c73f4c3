// `serried run --keep-going` when a host freezes: the ranks of the others live on.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>

#include "tests/hosts/hosts.h"

namespace serried::testing {
namespace {

using ::testing::HasSubstr;

TEST(JobOverHosts, KeepsGoingWhenAHostFreezesAndEndsWhatWakesUp) {
  const Hosts hosts(3);
  const auto start = [&](int host) {
    return hosts.serried(
        host, {"run", "--keep-going", "--nnodes", "2:3", "--rendezvous", "h0:29500", "-n", "1", SERRIED_ELASTIC_RANK},
        {"SERRIED_TOKEN=" + std::string(64, 'a')});
  };
  Command first = start(0), second = start(1), third = start(2);
  for (Command* command : {&first, &second, &third}) command->wait_for("of 3, count 0");
  const auto begin = std::chrono::steady_clock::now();
  hosts.freeze(2);
  for (Command* command : {&first, &second}) {
    command->wait_for("table 1 ");
    EXPECT_THAT(command->so_far(), HasSubstr("): it said nothing for 10 s, so it is frozen, off or cut off"));
  }
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  EXPECT_GT(seconds, 8);
  EXPECT_LT(seconds, 20);
  hosts.thaw(2);
  EXPECT_EQ(third.finish().exit_code, 1);
  // It may come again, to the same table as any newcomer.
  Command again = start(2);
  again.wait_for("began in generation 2 as 2 of 3, count 2");
  first.wait_for("table 2 ");
  second.wait_for("table 2 ");
}

// Its leader lives, and goes on without it: who seeks one finds the table that it was in over.
TEST(JobOverHosts, AHostThatWasCutOffIsRefusedWhenItComesBack) {
  const Hosts hosts(3);
  const auto start = [&](int host) {
    return hosts.serried(host,
                         {"run", "--keep-going", "--nnodes", "2:3", "--rendezvous", "h0:29500", "-n", "1",
                          "--lost-after", "6", SERRIED_ELASTIC_RANK},
                         {"SERRIED_TOKEN=" + std::string(64, 'a')});
  };
  Command first = start(0), second = start(1), third = start(2);
  for (Command* command : {&first, &second, &third}) command->wait_for("of 3, count 0");
  hosts.cut(2);
  for (Command* command : {&first, &second}) command->wait_for("table 1 ");
  third.wait_for(
      "lost the launcher of node 0 (h0): it said nothing for 6 s, so it is frozen, off or cut off; the ranks "
      "here wait, for up to 300 s, until a leader is at h0:29500\n");
  hosts.heal(2);
  const Result result = third.finish();
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.err, HasSubstr("[run] node 0 at h0:29500 refuses: the ranks of this node are of generation 0, and "
                                    "the job has gone on without this node to generation 1; the ranks here are ended\n"
                                    "  fix: start the launcher of that node again: its ranks join as any that come "
                                    "later\n  at:  node "));
  EXPECT_TRUE(third.nothing_left());
}

}  // namespace
}  // namespace serried::testing
