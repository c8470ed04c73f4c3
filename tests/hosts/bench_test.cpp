// `serried bench` on two hosts: what it finds of a link is what the link was made to be.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/hosts/hosts.h"

namespace serried::testing {
namespace {

using ::testing::HasSubstr;

/// Both hosts run `serried bench`, one rank each; what rank 0's launcher printed.
Result bench_on(const Hosts& hosts, const std::vector<std::string>& words) {
  const auto start = [&](int host) {
    std::vector<std::string> command = {"run",          "--nnodes", "2",  "--node-rank", std::to_string(host),
                                        "--rendezvous", "h0:29500", "-n", "1",           SERRIED_BINARY,
                                        "bench"};
    command.insert(command.end(), words.begin(), words.end());
    return hosts.serried(host, command, {"SERRIED_TOKEN=" + std::string(64, 'a')});
  };
  Command second = start(1), first = start(0);
  const Result result = first.finish();
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(second.finish().exit_code, 0);
  return result;
}

double beta_of(const std::string& machine) {
  const size_t link = machine.find("\"nic_out\""), beta = machine.find("\"beta_ns_per_byte\"", link);
  const size_t number = machine.find_first_of("0123456789", machine.find(':', beta));
  return number == std::string::npos ? 0 : std::stod(machine.substr(number));
}

TEST(BenchOverHosts, FindsHowFastTheLinkIs) {
  const Hosts hosts(2);
  for (const int host : {0, 1}) hosts.link(host, 200);
  const TemporaryFolder folder;
  const std::string path = folder.path() + "/machine.json";
  const Result result = bench_on(hosts, {"--calibrate", "--rounds", "5", "-o", path});
  EXPECT_THAT(result.err, HasSubstr("2 hosts of 1 ranks"));
  // 200 Mbit/s are 40 ns per byte, and the frames around them.
  const double beta = beta_of(read_file(path));
  EXPECT_GT(beta, 34);
  EXPECT_LT(beta, 60);
}

}  // namespace
}  // namespace serried::testing
