// `serried plan --simulate` as it is typed, with the mistakes that can be made.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <iterator>
#include <sstream>

#include "tests/process/command.h"

namespace serried::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

Result simulated(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), {"plan", "--simulate"});
  return serried(arguments);
}

std::string simulation_refusal(std::vector<std::string> arguments) {
  const Result result = simulated(std::move(arguments));
  EXPECT_EQ(result.exit_code, 2) << result.err;
  EXPECT_EQ(result.out, "");
  return result.err;
}

/// Hosts of one rank, which compute at once and send 125 MB/s without delays.
std::string gigabit_hosts(const TemporaryFolder& folder) {
  const std::string path = folder.path() + "/machine.json";
  write_file(path, R"({
    "ranks_per_host": 1, "hosts": 4096,
    "memory": {"alpha_us": 0, "beta_ns_per_byte": 0, "gamma_ns_per_byte": 0},
    "nic_out": {"alpha_us": 0, "beta_ns_per_byte": 8}, "nic_in": {"alpha_us": 0, "beta_ns_per_byte": 8},
    "compute": {"op_us": 0, "ns_per_flop": 0, "ns_per_byte": 0}
  })");
  return path;
}

/// The words of the line that begins with `word`.
std::vector<std::string> line_of(const std::string& text, const std::string& word) {
  for (const std::string& line : lines_of(text)) {
    std::istringstream in(line);
    std::vector<std::string> words{std::istream_iterator<std::string>(in), {}};
    if (!words.empty() && words[0] == word) return words;
  }
  ADD_FAILURE() << "no line begins with " << word << ":\n" << text;
  return std::vector<std::string>(20);
}

// Gradients are as many bytes as parameters; each host sends 2 (R - 1) / R of them.
TEST(PlanSimulate, DataParallelStepsTakeWhatTheirGradientsTakeOnTheLink) {
  const TemporaryFolder folder;
  const Result result = simulated({gigabit_hosts(folder), "--ranks", "2..8"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const size_t begin = result.out.find("of a GPT of ") + 12;
  const double bytes = 4 * std::stod(result.out.substr(begin));
  ASSERT_GT(bytes, 1e6);
  for (const int ranks : {2, 4, 8}) {
    const std::vector<std::string> words = line_of(result.out, std::to_string(ranks));
    EXPECT_EQ(words.at(1), "dp=" + std::to_string(ranks));
    EXPECT_NEAR(std::stod(words.at(4)) / (bytes * 8e-6 * 2 * (ranks - 1) / ranks), 1, 0.01) << ranks;
    EXPECT_EQ(words.at(5), "ms");
  }
  EXPECT_THAT(result.out, AllOf(HasSubstr("\non 8 ranks:\ncollective  axis"), HasSubstr("\nall_reduce  dp "),
                                HasSubstr("\nnot modelled: switches, incast, NUMA")));
}

TEST(PlanSimulate, ThousandsOfRanksAreAsQuickAsEight) {
  const Result result = simulated({"example", "--ranks", "8..16384", "--tp", "2"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(line_of(result.out, "16384").at(1), "dp=8192");
  EXPECT_EQ(line_of(result.out, "16384").at(3), "2048");
  EXPECT_THAT(result.out, HasSubstr("with jitter"));
}

TEST(PlanSimulate, AChainOfManyHostsTakesLongerThanTheirExchange) {
  const auto step_us = [](const Result& result) {
    const std::vector<std::string> words = line_of(result.out, "256");
    return std::stod(words.at(4)) * (words.at(5) == "s" ? 1e6 : words.at(5) == "ms" ? 1e3 : 1);
  };
  const double hosts = step_us(simulated({"example", "--ranks", "256"}));
  EXPECT_GT(step_us(simulated({"example", "--ranks", "256", "--order", "ranks"})), hosts);
  EXPECT_THAT(simulation_refusal({"example", "--order", "rank"}), HasSubstr("--order"));
}

TEST(PlanSimulate, WithoutNumbersForComputingTheStepIsMeasured) {
  const TemporaryFolder folder;
  std::string machine = read_file(gigabit_hosts(folder));
  const size_t begin = machine.find(",\n    \"compute\"");
  machine.erase(begin, machine.find("}", begin) + 1 - begin);
  write_file(folder.path() + "/other.json", machine);
  const Result result = simulated({folder.path() + "/other.json", "--ranks", "1"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.out, AllOf(HasSubstr("what is computed is as measured here"), HasSubstr("no collectives\n")));
}

TEST(PlanSimulate, FullyShardedStepsGatherAndReduce) {
  const TemporaryFolder folder;
  const Result result = simulated({gigabit_hosts(folder), "--ranks", "4,8", "--fsdp", "4"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.out, AllOf(HasSubstr("\nreduce_scatter  fsdp "), HasSubstr("\nall_gather      fsdp "),
                                HasSubstr("\nall_reduce      dp ")));
  EXPECT_EQ(line_of(result.out, "4").at(1), "fsdp=4");
}

// What was saved for two copies is what is simulated for any number of them.
TEST(PlanSimulate, SavedStepsTakeAsLongAsTheirModel) {
  const TemporaryFolder folder;
  const std::string step = folder.path() + "/step.graph", machine = gigabit_hosts(folder);
  const Result saved = serried({"plan", "--dp", "2", "--tp", "2", "--save", step});
  ASSERT_EQ(saved.exit_code, 0) << saved.err;
  const Result by_model = simulated({machine, "--ranks", "4,16", "--tp", "2"});
  const Result by_step = simulated({machine, "--ranks", "4,16", "--step", step, "--mesh", "dp=*,tp=2"});
  ASSERT_EQ(by_step.exit_code, 0) << by_step.err;
  EXPECT_THAT(by_step.out, StartsWith("One training step of " + step + ",\nsimulated on " + machine));
  EXPECT_EQ(by_step.out.substr(by_step.out.find("ranks  mesh")), by_model.out.substr(by_model.out.find("ranks  mesh")));
}

TEST(PlanSimulate, SavedStepsThatCannotBeSimulatedAreNamed) {
  const TemporaryFolder folder;
  const std::string step = folder.path() + "/step.graph", machine = gigabit_hosts(folder);
  ASSERT_EQ(serried({"plan", "--fsdp", "2", "--save", step}).exit_code, 0);
  EXPECT_EQ(simulation_refusal({machine, "--step", step}),
            "[plan] --step needs a mesh\n  fix: pass --mesh dp=*,tp=2, with the axes that groups are\n");
  EXPECT_THAT(simulation_refusal({machine, "--step", step, "--mesh", "fsdp=*"}),
              AllOf(HasSubstr(" along \"fsdp\", whose bytes depend on how many ranks it has\n"),
                    HasSubstr("fix: give that axis in --mesh the size with which the step was captured\n")));
  EXPECT_EQ(simulation_refusal({machine, "--step", step, "--mesh", "fsdp=2", "--ranks", "4"}),
            "[plan] 4 ranks do not fit the mesh, whose axes make 2\n"
            "  fix: pass --ranks 2, or * as the size of an axis\n");
  EXPECT_THAT(simulation_refusal({machine, "--step", step, "--mesh", "dp=2", "--ranks", "2"}),
              HasSubstr(" on the group \"fsdp\", and nothing says which axis that is\n"
                        "  fix: pass --group fsdp=AXIS, with an axis of --mesh\n"));
  for (const std::string mesh : {"dp", "dp=0", "=2", "dp=2,dp=2", "dp=*,tp=*", "dp=two"}) {
    EXPECT_EQ(simulation_refusal({machine, "--step", step, "--mesh", mesh}),
              "[plan] --mesh is \"" + mesh +
                  "\"\n"
                  "  fix: pass axes with their sizes, of which one may be *: dp=*,tp=2\n");
  }
  EXPECT_EQ(simulation_refusal({machine, "--step", step, "--mesh", "a=2", "--ranks", "2", "--group", "fsdp=b"}),
            "[plan] --group is \"fsdp=b\"\n  fix: pass the name of a group and an axis of --mesh: default=dp\n");
  EXPECT_THAT(simulation_refusal({machine, "--step", "/no/step", "--mesh", "a=2"}), HasSubstr("/no/step"));
  const Result other = simulated({machine, "--step", step, "--mesh", "a=2", "--ranks", "2", "--group", "fsdp=a"});
  EXPECT_EQ(other.exit_code, 0) << other.err;
}

TEST(PlanSimulate, WritesATraceOfRankZero) {
  const TemporaryFolder folder;
  const std::string trace = folder.path() + "/step.json";
  ASSERT_EQ(simulated({gigabit_hosts(folder), "--ranks", "2", "--trace", trace}).exit_code, 0);
  EXPECT_THAT(read_file(trace), AllOf(HasSubstr("\"traceEvents\":["), HasSubstr("\"name\":\"all_reduce ")));
}

TEST(PlanSimulate, HelpTellsOfTheMachine) {
  EXPECT_THAT(simulated({"--help"}).out, AllOf(HasSubstr("8..16384"), HasSubstr("docs/simulation.md")));
  EXPECT_THAT(serried({"plan", "--help"}).out, HasSubstr("serried plan --simulate --help"));
}

TEST(PlanSimulate, MistakesInTheMachineAreNamedWithTheirLine) {
  const TemporaryFolder folder;
  const std::string path = folder.path() + "/m.json";
  write_file(path, "{\n  \"ranks_per_hots\": 8\n}\n");
  EXPECT_EQ(
      simulation_refusal({path}),
      "[plan] " + path +
          ", line 2: there is no key \"ranks_per_hots\"; did you mean \"ranks_per_host\"?\n"
          "  fix: known are compute, cores_per_host, hosts, jitter, memory, nic_in, nic_out, ranks_per_host, uplink\n");
  EXPECT_THAT(simulation_refusal({"/no/machine.json"}),
              StartsWith("[plan] cannot read \"/no/machine.json\": No such file or directory\n  fix: "));
}

TEST(PlanSimulate, RanksThatDoNotFitAreNamed) {
  const TemporaryFolder folder;
  EXPECT_EQ(simulation_refusal({"example", "--ranks", "6", "--fsdp", "4"}),
            "[plan] 6 ranks do not divide by 4, into copies of the model\n  fix: pass a multiple of 4 as --ranks\n");
  EXPECT_EQ(simulation_refusal({gigabit_hosts(folder), "--ranks", "8192"}),
            "[plan] 8192 ranks do not fit on the machine: it has 4096 hosts of 1 ranks\n"
            "  fix: pass up to 4096 ranks, or leave out \"hosts\" in the machine\n");
  EXPECT_THAT(simulation_refusal({"example", "--ranks", "8", "--dp", "3"}),
              HasSubstr("make 3 ranks, and --ranks is 8"));
}

TEST(PlanSimulate, NumbersOfRanksThatAreNoneAreNamed) {
  for (const std::string ranks : {"eight", "8..", "0", "8,", "8..x", "-4..8"}) {
    EXPECT_EQ(simulation_refusal({"example", "--ranks=" + ranks}),
              "[plan] --ranks is \"" + ranks + "\"\n  fix: pass 64, or 8..4096 for 8, 16, 32 and so on, or 48,64,96\n");
  }
  EXPECT_EQ(simulation_refusal({"example", "--ranks", "64..8"}),
            "[plan] --ranks is \"64..8\"\n  fix: pass the smaller number first\n");
  EXPECT_EQ(simulation_refusal({"example", "--rank", "8"}),
            "[plan] there is no option --rank; did you mean --ranks?\n"
            "  fix: serried plan --simulate --help lists the options\n");
}

}  // namespace
}  // namespace serried::testing
