// Groups of ranks that `serried run` starts on two hosts.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <regex>
#include <utility>

#include "tests/hosts/hosts.h"

namespace serried::testing {
namespace {

using ::testing::AnyOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

/// What runs on two hosts, two ranks each.
struct Job {
  std::string mode;
  std::string backend = "auto";
  std::vector<std::string> environment = {};
  std::vector<std::string> options = {};
};

std::vector<std::string> node(int rank, const Job& job) {
  std::vector<std::string> words = {"run",      "--nnodes", "2", "--node-rank", std::to_string(rank), "--rendezvous",
                                    "h0:29500", "-n",       "2"};
  words.insert(words.end(), job.options.begin(), job.options.end());
  words.insert(words.end(), {SERRIED_HOSTS_WORKER, job.mode, job.backend});
  return words;
}

Command start(const Hosts& hosts, int host, const Job& job) {
  std::vector<std::string> environment = job.environment;
  environment.push_back("SERRIED_TOKEN=" + std::string(64, 'a'));
  return hosts.serried(host, node(host, job), environment);
}

/// Four ranks on two hosts add up 1 to 4, without a word on stderr that is c10d's.
void expect_sum(const Hosts& hosts, const std::string& backend, const std::string& taken) {
  Command second = start(hosts, 1, {"sum", backend});
  Command first = start(hosts, 0, {"sum", backend});
  int warnings = 0;
  for (Command* command : {&first, &second}) {
    const Result result = command->finish();
    warnings += count_of(result.err, "gloo between hosts authenticates nobody: whoever reaches its ports can ");
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_EQ(count_of(result.out, "sum 10 on " + taken), 2) << result.out << result.err;
    EXPECT_THAT(result.err, Not(HasSubstr("[W")));
    EXPECT_TRUE(command->nothing_left());
  }
  EXPECT_EQ(warnings, backend == "gloo" ? 1 : 0);
}

TEST(JobOverHosts, AddsUp) {
  expect_sum(Hosts(2), "auto", "hierarchical");
}

TEST(JobOverHosts, AddsUpByGlooWhereThatIsAskedFor) {
  expect_sum(Hosts(2), "gloo", "gloo");
}

TEST(JobOverHosts, AddsUpOverWiresOfGloo) {
  expect_sum(Hosts(2), "hierarchical:gloo", "hierarchical");
}

TEST(JobOverHosts, AddsUpWhereTheOwnNameIsLoopback) {
  for (const auto& [backend, taken] :
       {std::pair("auto", "hierarchical"), std::pair("gloo", "gloo"), std::pair("hierarchical:gloo", "hierarchical")}) {
    expect_sum(Hosts(2, {.trap = true}), backend, taken);
  }
}

/// From the last call that began, or the death, to the last that raised; quiet machines take less than 0.1 s.
void expect_raised_within_a_second(const std::string& out) {
  const std::regex times("\\[([0-9]+) to ([0-9]+) ms\\]");
  int64_t begin = 0, end = 0;
  for (auto it = std::sregex_iterator(out.begin(), out.end(), times); it != std::sregex_iterator(); ++it) {
    begin = std::max<int64_t>(begin, std::stoll((*it)[1]));
    end = std::max<int64_t>(end, std::stoll((*it)[2]));
  }
  EXPECT_GT(begin, 0) << out;
  EXPECT_LT(end - begin, 1000) << out;
}

void expect_mismatch_is_named(const std::string& backend) {
  const Hosts hosts(2);
  Command second = start(hosts, 1, {"mismatch", backend});
  Command first = start(hosts, 0, {"mismatch", backend});
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
  expect_raised_within_a_second(a.out + b.out);
}

TEST(JobOverHosts, NamesBothRanksOfAMismatch) {
  expect_mismatch_is_named("auto");
}

TEST(JobOverHosts, NamesMismatchesAtOnceEachTime) {
  const Hosts hosts(2);
  Command second = start(hosts, 1, {"mismatches 30"});
  Command first = start(hosts, 0, {"mismatches 30"});
  const Result a = first.finish();
  const Result b = second.finish();
  EXPECT_EQ(a.exit_code, 0) << a.err;
  EXPECT_EQ(b.exit_code, 0) << b.err;
  const std::regex pattern("30 mismatches raised, the slowest after ([0-9]+) ms");
  const std::string out = a.out + b.out;
  EXPECT_EQ(count_of(out, "30 mismatches raised"), 4) << out;
  for (auto it = std::sregex_iterator(out.begin(), out.end(), pattern); it != std::sregex_iterator(); ++it) {
    EXPECT_LT(std::stoi((*it)[1]), 1000);
  }
}

TEST(JobOverHosts, NamesBothRanksOfAMismatchOnGloo) {
  expect_mismatch_is_named("gloo");
}

/// All four ranks, or those of them that come, raise, and say all of `words`. Returns what they said.
std::string expect_raised(const std::string& mode, int num_ranks, const std::vector<std::string>& words) {
  const Hosts hosts(2);
  Command second = start(hosts, 1, {mode});
  Command first = start(hosts, 0, {mode});
  const Result a = first.finish();
  const Result b = second.finish();
  EXPECT_EQ(count_of(a.out + b.out, "raised: "), num_ranks) << a.out << b.out << a.err << b.err;
  for (const std::string& line : lines_of(a.out + b.out)) {
    for (const std::string& word : words) EXPECT_THAT(line, HasSubstr(word));
  }
  return a.out + b.out;
}

TEST(JobOverHosts, NamesBothRanksWhereKindsDiffer) {
  expect_raised_within_a_second(
      expect_raised("other_kind", 4, {"rank 0 #1 broadcast f32[300]", "rank 1 #1 all_reduce f32[300]"}));
}

TEST(JobOverHosts, NamesBothRanksWhereTheOrderOfCallsDiffers) {
  expect_raised_within_a_second(
      expect_raised("other_order", 4, {"rank 0 #1 all_reduce f32[300]", "rank 3 #1 all_reduce f32[100000]"}));
}

#ifdef SERRIED_WITH_UCX
TEST(JobOverHosts, TwoHostsThatDoNotReachEachOtherAreNamedWithTheAddressThatWasTried) {
  const Hosts hosts(3);
  hosts.cut(1, 2);
  for (const int host : {1, 2}) {
    EXPECT_EQ(hosts.run(host, {"sysctl", "-q", "-w", "net.ipv4.tcp_syn_retries=1"}).exit_code, 0);  // 3 s, not 127
  }
  std::vector<std::unique_ptr<Command>> nodes;
  for (int host = 0; host < 3; ++host) {
    const std::vector<std::string> words = {
        "run",      "--nnodes",           "3",   "--node-rank", std::to_string(host), "--rendezvous",
        "h0:29500", SERRIED_HOSTS_WORKER, "sum", "auto"};
    nodes.emplace_back(new Command(hosts.serried(host, words, {"SERRIED_TOKEN=" + std::string(64, 'a')})));
  }
  for (const auto& node : nodes) {
    const Result result = node->finish();
    EXPECT_NE(result.exit_code, 0);
    EXPECT_THAT(
        result.err,
        AnyOf(ContainsRegex("rank 2 is lost while rank 1 was in [^\n]*: [^\n]* \\(from rank 1 to 10.77.0.3\\)"),
              ContainsRegex("rank 1 is lost while rank 2 was in [^\n]*: [^\n]* \\(from rank 2 to 10.77.0.2\\)")));
  }
}
#endif

TEST(JobOverHosts, NamesARankThatDoesNotCome) {
  expect_raised("absent", 3, {"timed out", "rank 3"});
}

struct Victim {
  const char* collective;
  const char* rank;
  // What UCX 1.13 sends without a copy may end a survivor, where such messages go both ways: docs/limits.md.
  const char* environment = "UCX_ZCOPY_THRESH=auto";

  friend void PrintTo(const Victim& victim, std::ostream* out) { *out << victim.collective; }
};

class JobOverHostsIn : public ::testing::TestWithParam<Victim> {};

INSTANTIATE_TEST_SUITE_P(Each, JobOverHostsIn,
                         ::testing::Values(Victim{"all_reduce", "rank 3"}, Victim{"reduce", "rank 3"},
                                           Victim{"reduce_scatter", "rank 3"}, Victim{"scatter", "rank 3"},
                                           Victim{"broadcast", "rank 2"},
                                           Victim{"all_gather", "rank 2", "UCX_ZCOPY_THRESH=inf"},
                                           Victim{"all_to_all", "rank 3", "UCX_ZCOPY_THRESH=inf"}),
                         [](const auto& info) { return std::string(info.param.collective); });

TEST_P(JobOverHostsIn, ARankThatIsKilledInTheMiddleIsNamed) {
  const Hosts hosts(2);
  for (const int host : {0, 1}) hosts.link(host, 50);
  const Job job{std::string("killed in ") + GetParam().collective, "auto", {GetParam().environment}};
  Command second = start(hosts, 1, job);
  Command first = start(hosts, 0, job);
  const Result a = first.finish();
  const Result b = second.finish();
  EXPECT_NE(b.exit_code, 0);
  EXPECT_EQ(count_of(a.out + b.out, "raised: "), 3) << a.out << b.out << a.err << b.err;
  for (const std::string& line : lines_of(a.out + b.out)) EXPECT_THAT(line, HasSubstr(GetParam().rank)) << line;
  EXPECT_TRUE(first.nothing_left());
  EXPECT_TRUE(second.nothing_left());
}

TEST(JobOverHosts, NamesARankThatIsKilled) {
  const Hosts hosts(2);
  Command second = start(hosts, 1, {"killed"});
  Command first = start(hosts, 0, {"killed"});
  const Result a = first.finish();
  const Result b = second.finish();
  EXPECT_NE(a.exit_code, 0);
  EXPECT_NE(b.exit_code, 0);
  EXPECT_EQ(count_of(a.out + b.out, "raised: "), 3) << a.out << b.out << a.err << b.err;
  for (const std::string& line : lines_of(a.out + b.out)) EXPECT_THAT(line, HasSubstr("rank 3")) << line;
  expect_raised_within_a_second(a.out + b.out);
  EXPECT_TRUE(first.nothing_left());
  EXPECT_TRUE(second.nothing_left());
}

/// Of two numbers that `pattern` finds in the text.
std::pair<double, double> numbers_in(const std::string& text, const std::string& pattern) {
  std::smatch match;
  if (std::regex_search(text, match, std::regex(pattern))) return {std::stod(match[1]), std::stod(match[2])};
  ADD_FAILURE() << "no " << pattern << " in " << text;
  return {1e9, 0};
}

TEST(JobOverHosts, SaysWhoHasNotComeOnAnotherHostAndLeavesDumpsOfBoth) {
  const Hosts hosts(2);
  const TemporaryFolder logs;
  const Job job{.mode = "missing", .options = {"--slow-after", "0.5", "--log-dir", logs.path()}};
  Command second = start(hosts, 1, job);
  Command first = start(hosts, 0, job);
  const Result a = first.finish();
  const Result b = second.finish();
  EXPECT_NE(a.exit_code, 0);
  EXPECT_THAT(a.err, ContainsRegex("\\[run\\] group auto/1: rank 3 \\(" + hosts.name(1) +
                                   "\\) has not come to #2 all_reduce f32\\[512\\] sum; 3 ranks wait since [0-9.]+ s; "
                                   "rank 3 left #1 [0-9.]+ s ago and (sleeps|runs)"));
  EXPECT_THAT(b.err, Not(HasSubstr("has not come to #2")));
  const std::string page = serried({"debug", "show", logs.path() + "/dump"}).out;
  EXPECT_THAT(page, HasSubstr(", attempt 0: 4 ranks, 2 dumps by serried "));
  EXPECT_THAT(page, HasSubstr("\n  rank 3 has not come to #2\n"));
  // They have one clock: what was measured is the error alone.
  const auto [offset, error] = numbers_in(page, "node 0's: (-?[0-9.]+) ms apart, known to ([0-9.]+) ms");
  EXPECT_LE(std::abs(offset), error + 0.001);
  EXPECT_LT(error, 1000);
}

// Host 1 counts from another moment on, as hosts do.
TEST(JobOverHosts, MergesTracesByTheClocksThatLaunchersMeasured) {
  const Hosts hosts(2);
  const TemporaryFolder traces;
  const bool has_clocks = hosts.run(1, {"unshare", "--time", "true"}).exit_code == 0;
  const Job job{.mode = "sum", .environment = {"SERRIED_TRACE=" + traces.path()}};
  std::vector<std::string> words = {"env", "SERRIED_TOKEN=" + std::string(64, 'a'), job.environment[0]};
  if (has_clocks) words.insert(words.end(), {"unshare", "--fork", "--kill-child", "--time", "--monotonic", "3600"});
  words.push_back(SERRIED_BINARY);
  const std::vector<std::string> run = node(1, job);
  words.insert(words.end(), run.begin(), run.end());
  Command second = hosts.start(1, words);
  Command first = start(hosts, 0, job);
  EXPECT_EQ(first.finish().exit_code, 0);
  EXPECT_EQ(second.finish().exit_code, 0);
  const Result merged = serried({"trace", "merge", traces.path()});
  EXPECT_EQ(merged.exit_code, 0) << merged.err;
  if (!has_clocks) {
    EXPECT_THAT(merged.err, Not(HasSubstr("the clock of")));
    return;
  }
  const auto [offset, error] = numbers_in(
      merged.err, "is (-?[0-9.]+) ms behind that of .*, \\+- ([0-9.]+) ms, as their launchers have measured");
  EXPECT_NEAR(offset, -3600e3, error + 0.001);
  EXPECT_LT(error, 1000);
}

/// All four ranks say `text`.
void expect_said(const Job& job, const std::string& text, const BadLink& link = {}) {
  const Hosts hosts(2);
  if (link.megabits > 0) hosts.make_bad(link);
  Command second = start(hosts, 1, job);
  Command first = start(hosts, 0, job);
  const Result a = first.finish();
  const Result b = second.finish();
  EXPECT_EQ(a.exit_code, 0) << a.err;
  EXPECT_EQ(b.exit_code, 0) << b.err;
  EXPECT_EQ(count_of(a.out + b.out, text), 4) << a.out << b.out << a.err << b.err;
}

TEST(JobOverHosts, HasTheBitsOfOneHost) {
  expect_said({"bits"}, "same bits");
}

/// `ranks_of[h]` ranks on host h; each has the bits of one host in every collective.
void expect_bits_of_one_host(const std::vector<int>& ranks_of, const std::string& backend = "auto") {
  const Hosts hosts(int(ranks_of.size()));
  std::vector<std::unique_ptr<Command>> nodes;
  for (int host = 0; host < int(ranks_of.size()); ++host) {
    const std::vector<std::string> words = {"run",
                                            "--nnodes",
                                            std::to_string(ranks_of.size()),
                                            "--node-rank",
                                            std::to_string(host),
                                            "--rendezvous",
                                            "h0:29500",
                                            "-n",
                                            std::to_string(ranks_of[size_t(host)]),
                                            SERRIED_HOSTS_WORKER,
                                            "all bits",
                                            backend};
    nodes.emplace_back(new Command(hosts.serried(host, words, {"SERRIED_TOKEN=" + std::string(64, 'a')})));
  }
  for (size_t host = 0; host < nodes.size(); ++host) {
    const Result result = nodes[host]->finish();
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_EQ(count_of(result.out, "] same bits\n"), ranks_of[host]) << result.out << result.err;
  }
}

TEST(JobOverHosts, EveryCollectiveHasTheBitsOfOneHostWithRanks3And1) {
  expect_bits_of_one_host({3, 1});
}

TEST(JobOverHosts, EveryCollectiveHasTheBitsOfOneHostOverGlooWithRanks3And1) {
  expect_bits_of_one_host({3, 1}, "hierarchical:gloo");
}

TEST(JobOverHosts, EveryCollectiveHasTheBitsOfOneHostOnFourHosts) {
  expect_bits_of_one_host({1, 1, 1, 1});
}

TEST(JobOverHosts, HasTheBitsOfOneHostOverALinkThatLosesAndMixesUp) {
  expect_said({"few bits"}, "same bits", {.loss_percent = 2, .reorder_percent = 20, .delay_ms = 10, .megabits = 100});
}

TEST(JobOverHosts, HasTheBitsOfOneHostOverASlowLink) {
  expect_said({"few bits"}, "same bits", {.delay_ms = 50, .megabits = 10});
}

TEST(JobOverHosts, TrainsAsOneProcess) {
  expect_said({"ddp"}, "trained alike");
}

TEST(JobOverHosts, SavesAndLoadsTogether) {
  const TemporaryFolder folder;
  for (const char* backend : {"auto", "gloo"}) {
    expect_said({"checkpoint", backend, {"FOLDER=" + folder.path()}}, "came back");
    EXPECT_EQ(serried({"checkpoint", "verify", folder.path() + "/c"}).exit_code, 0);
  }
}

}  // namespace
}  // namespace serried::testing
