// `serried run` over two hosts.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/hosts/hosts.h"

namespace serried::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

std::vector<std::string> node(int rank, const std::string& mode) {
  return {"run", "--nnodes",           "2",  "--node-rank", std::to_string(rank), "--rendezvous", "h0:29500", "-n",
          "2",   SERRIED_HOSTS_WORKER, mode, "gloo"};
}

Command start(const Hosts& hosts, int host, const std::string& mode) {
  return hosts.serried(host, node(host, mode), {"SERRIED_TOKEN=" + std::string(64, 'a')});
}

/// Four ranks on two hosts add up 1 to 4, without a word on stderr that is c10d's.
void expect_sum(const Hosts& hosts) {
  Command second = start(hosts, 1, "sum");
  Command first = start(hosts, 0, "sum");
  for (Command* command : {&first, &second}) {
    const Result result = command->finish();
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_EQ(count_of(result.out, "sum 10 on gloo"), 2) << result.out << result.err;
    EXPECT_THAT(result.err, Not(HasSubstr("[W")));
    EXPECT_TRUE(command->nothing_left());
  }
}

TEST(JobOverHosts, AddsUp) {
  expect_sum(Hosts(2));
}

TEST(JobOverHosts, AddsUpWhereTheOwnNameIsLoopback) {
  expect_sum(Hosts(2, {.trap = true}));
}

TEST(JobOverHosts, NamesBothRanksOfAMismatch) {
  const Hosts hosts(2);
  Command second = start(hosts, 1, "mismatch");
  Command first = start(hosts, 0, "mismatch");
  const Result a = first.finish();
  const Result b = second.finish();
  EXPECT_EQ(a.exit_code, 0) << a.err;
  EXPECT_EQ(b.exit_code, 0) << b.err;
  EXPECT_EQ(count_of(a.out + b.out, "raised: "), 4) << a.out << b.out << a.err << b.err;
  for (const std::string& line : lines_of(a.out + b.out)) {
    EXPECT_THAT(line, HasSubstr("rank 0"));
    EXPECT_THAT(line, HasSubstr("f32[1000]"));
    EXPECT_THAT(line, HasSubstr("f32[300]"));
  }
}

}  // namespace
}  // namespace serried::testing
