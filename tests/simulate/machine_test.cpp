// machine.json: what it says, and all that may be wrong with it.
#include "tools/serried/simulate/machine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <iterator>

#include <fstream>

#include "tests/simulate/machines.h"

namespace serried::simulation {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

const std::string kLeast = R"({
  "ranks_per_host": 4,
  "memory": {"alpha_us": 2, "beta_ns_per_byte": 0.125, "gamma_ns_per_byte": 0.25},
  "nic_out": {"alpha_us": 10, "beta_ns_per_byte": 8},
  "nic_in": {"alpha_us": 0, "beta_ns_per_byte": 8}
})";

// kLeast with something else in place of `what`.
std::string but(const std::string& what, const std::string& instead) {
  std::string text = kLeast;
  const size_t begin = text.find(what);
  EXPECT_NE(begin, std::string::npos) << what;
  return text.replace(begin, what.size(), instead);
}

std::string error_in(const std::string& text) {
  return error_of([&] { parse_machine(text, "m.json"); });
}

TEST(Machine, SaysWhatItsFileSays) {
  const Machine machine = parse_machine(kLeast, "m.json");
  EXPECT_EQ(machine.ranks_per_host, 4);
  EXPECT_EQ(machine.cores(), 4);
  EXPECT_EQ(machine.memory.gamma_ns_per_byte, Fitted::exactly(0.25));
  EXPECT_EQ(machine.nic_out.beta_ns_per_byte.value, 8);
  EXPECT_EQ(machine.nic_out.message_us.value, 0);
  EXPECT_FALSE(machine.uplink.has_value());
  EXPECT_FALSE(machine.hosts.has_value());
}

TEST(Machine, SurvivesItsOwnText) {
  Machine machine = full_machine(4);
  machine.hosts = 16;
  machine.compute = Compute{Fitted::exactly(1), {0.02, 0.01, 0.04}, Fitted::exactly(0.1)};
  machine.jitter_sigma = 0.05;
  machine.nic_out.alpha_us = {12.5, 11, 14.25};
  EXPECT_EQ(parse_machine(to_json(machine), "m.json"), machine);
}

// The page shows the machine that the word "example" stands for.
TEST(Machine, OfTheDocumentationIsTheExample) {
  std::ifstream page(SERRIED_DOCS "/simulation.md");
  const std::string text{std::istreambuf_iterator<char>(page), {}};
  const std::string fence = "```json\n";
  const size_t begin = text.find(fence) + fence.size(), end = text.find("```", begin);
  ASSERT_LT(end, text.size());
  EXPECT_EQ(parse_machine(text.substr(begin, end - begin), "simulation.md"), example_machine());
}

TEST(Machine, NamesTheNearestKeyAndTheLine) {
  EXPECT_EQ(error_in(but("nic_out", "nic_uot")),
            "m.json, line 4: there is no key \"nic_uot\"; did you mean \"nic_out\"?\n"
            "  fix: known are compute, cores_per_host, hosts, jitter, memory, nic_in, nic_out, ranks_per_host, uplink");
  EXPECT_EQ(error_in(but("gamma_ns_per_byte", "gama_ns_per_byte")),
            "m.json, line 3: there is no key \"gama_ns_per_byte\" in \"memory\"; did you mean \"gamma_ns_per_byte\"?\n"
            "  fix: known are alpha_us, beta_ns_per_byte, gamma_ns_per_byte");
  EXPECT_THAT(error_in(but("{\n", "{\n\"zzzzzzzzzz\": 1,\n")),
              StartsWith("m.json, line 2: there is no key \"zzzzzzzzzz\"\n"));
}

TEST(Machine, NamesWhatIsMissing) {
  EXPECT_EQ(error_in(but("\"ranks_per_host\": 4,", "")),
            "m.json, line 1: it has no \"ranks_per_host\"\n  fix: add the key; docs/simulation.md says what it means");
  EXPECT_EQ(error_in(but("\"alpha_us\": 10, ", "")),
            "m.json, line 4: \"nic_out\" has no \"alpha_us\"\n"
            "  fix: add the key; docs/simulation.md says what it means");
}

TEST(Machine, NamesLineAndColumnOfWhatIsNoJson) {
  EXPECT_EQ(error_in(but("4,", "4")),
            "m.json, line 3, column 10: syntax error while parsing object - unexpected string literal; expected '}'\n"
            "  fix: make it JSON");
  EXPECT_THAT(error_in(""), StartsWith("m.json, line 1, column "));
  EXPECT_THAT(error_in("{\"a\": 1"), StartsWith("m.json, line 1, column "));
}

TEST(Machine, RefusesNumbersThatNoMachineHas) {
  EXPECT_EQ(error_in(but("\"beta_ns_per_byte\": 8},", "\"beta_ns_per_byte\": -8},")),
            "m.json, line 4: \"nic_out.beta_ns_per_byte\" is -8\n  fix: write a number from 0 to 1000000");
  EXPECT_EQ(error_in(but("\"ranks_per_host\": 4", "\"ranks_per_host\": 2.5")),
            "m.json, line 2: \"ranks_per_host\" is 2.5\n  fix: write a whole number");
  EXPECT_THAT(error_in(but("\"ranks_per_host\": 4", "\"ranks_per_host\": 0")), HasSubstr("from 1 to 10000000"));
  EXPECT_THAT(error_in(but("\"ranks_per_host\": 4", "\"ranks_per_host\": 1e300")), HasSubstr("is 1e+300"));
  EXPECT_EQ(error_in(but("\"alpha_us\": 10", "\"alpha_us\": {\"value\": 10, \"low\": 11, \"high\": 12}")),
            "m.json, line 4: \"nic_out.alpha_us\" is not between its low and its high\n"
            "  fix: let low <= value <= high");
}

TEST(Machine, RefusesWhatIsNoNumber) {
  EXPECT_EQ(error_in(but("\"ranks_per_host\": 4", "\"ranks_per_host\": \"4\"")),
            "m.json, line 2: \"ranks_per_host\" is a text\n  fix: write a number or an object there");
  EXPECT_EQ(error_in(but("\"ranks_per_host\": 4", "\"ranks_per_host\": {}")),
            "m.json, line 2: \"ranks_per_host\" is an object\n  fix: write a number there");
  EXPECT_EQ(error_in(but("{\"alpha_us\": 10, \"beta_ns_per_byte\": 8}", "10")),
            "m.json, line 4: \"nic_out\" is a number\n  fix: write an object there, {...}");
  EXPECT_THAT(error_in("[1]"), StartsWith("m.json, line 1: it is a list, not an object\n"));
  EXPECT_THAT(error_in("7"), StartsWith("m.json, line 1: it is a number, not an object\n"));
  EXPECT_EQ(error_in(but("4,", "4, \"ranks_per_host\": 8,")),
            "m.json, line 2: the key \"ranks_per_host\" is there twice\n  fix: leave one of them out");
  EXPECT_THAT(error_in("{\"a\": {\"b\": {\"c\": {\"d\": {}}}}}"),
              StartsWith("m.json, line 1: it is nested too deeply\n"));
}

TEST(Machine, NamesAFileThatIsNotThere) {
  EXPECT_EQ(error_of([] { read_machine("/no/such/machine.json"); }),
            "cannot read \"/no/such/machine.json\": No such file or directory\n"
            "  fix: pass a machine as JSON; docs/simulation.md has one");
}

}  // namespace
}  // namespace serried::simulation
