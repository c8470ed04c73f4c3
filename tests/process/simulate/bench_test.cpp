// `serried bench` as it is typed: what it measures is a machine that can be simulated.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/process/command.h"

namespace serried::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

std::string bench_refusal(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), "bench");
  const Result result = serried(arguments);
  EXPECT_EQ(result.exit_code, 2) << result.err;
  return result.err;
}

TEST(Bench, MeasuresAMachineThatCanBeSimulated) {
  const TemporaryFolder folder;
  const std::string path = folder.path() + "/machine.json";
  const Result result = serried({"bench", "--calibrate", "-n", "2", "--rounds", "3", "-o", path});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.err, AllOf(HasSubstr("1 host of 2 ranks"), HasSubstr("beta ns/byte"), HasSubstr("ns/flop"),
                                HasSubstr("nothing is known of links"), HasSubstr("written to " + path)));
  const Result simulated = serried({"plan", "--simulate", path, "--ranks", "2"});
  EXPECT_EQ(simulated.exit_code, 0) << simulated.err;
  EXPECT_THAT(simulated.out, HasSubstr(": 2 ranks per host; what is computed is as the machine says."));
  const Result checked = serried({"bench", "--check", path, "-n", "2", "--rounds", "3"});
  EXPECT_EQ(checked.exit_code, 0) << checked.err;
  EXPECT_THAT(checked.out, AllOf(HasSubstr("measured us"), HasSubstr("all_to_all 768.0 KiB"), HasSubstr("DDP step, ")));
}

TEST(Bench, OneRankPerHostMeasuresMemoryByItself) {
  const TemporaryFolder folder;
  const std::string path = folder.path() + "/machine.json";
  const Result result = serried({"bench", "--calibrate", "-n", "1", "--rounds", "3", "-o", path});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(read_file(path), HasSubstr("\"ranks_per_host\": 1"));
}

TEST(Bench, HelpSaysHowToStartItOnSeveralHosts) {
  const Result result = serried({"bench", "--help"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("serried run --nnodes 2 --rendezvous host:29500 -n 4 serried bench --calibrate"));
}

TEST(Bench, MistakesAreNamed) {
  EXPECT_EQ(bench_refusal({}), "[bench] there is nothing to do\n  fix: pass --calibrate, or --check with a machine\n");
  EXPECT_EQ(bench_refusal({"--calibrate", "--check", "m.json"}),
            "[bench] --calibrate and --check are two things\n  fix: pass --calibrate, or --check with a machine\n");
  EXPECT_EQ(bench_refusal({"--calibrate", "-n", "-2"}), "[bench] -n is -2\n  fix: pass 1 or more\n");
  EXPECT_EQ(bench_refusal({"--calibrate", "--rounds", "1"}), "[bench] --rounds is 1\n  fix: pass 3 or more\n");
  EXPECT_EQ(bench_refusal({"--calibrat"}),
            "[bench] there is no option --calibrat; did you mean --calibrate?\n"
            "  fix: serried bench --help lists the options\n");
}

TEST(Bench, AMachineOfOtherHostsIsNamed) {
  const TemporaryFolder folder;
  const std::string path = folder.path() + "/machine.json";
  write_file(path, R"({"ranks_per_host": 8, "memory": {"alpha_us": 0, "beta_ns_per_byte": 0, "gamma_ns_per_byte": 0},
    "nic_out": {"alpha_us": 0, "beta_ns_per_byte": 0}, "nic_in": {"alpha_us": 0, "beta_ns_per_byte": 0}})");
  const Result result = serried({"bench", "--check", path, "-n", "1"});
  EXPECT_NE(result.exit_code, 0);
  EXPECT_THAT(result.err, HasSubstr("[bench] the machine has 8 ranks on a host, and 1 are started"));
}

}  // namespace
}  // namespace serried::testing
