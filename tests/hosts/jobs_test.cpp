// Groups of ranks that `serried run` starts on two hosts.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/hosts/hosts.h"

namespace serried::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

/// What runs on two hosts, two ranks each.
struct Job {
  std::string mode;
  std::string backend = "auto";
  std::vector<std::string> environment = {};
};

std::vector<std::string> node(int rank, const Job& job) {
  return {"run", "--nnodes",           "2",      "--node-rank", std::to_string(rank), "--rendezvous", "h0:29500", "-n",
          "2",   SERRIED_HOSTS_WORKER, job.mode, job.backend};
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
  for (Command* command : {&first, &second}) {
    const Result result = command->finish();
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_EQ(count_of(result.out, "sum 10 on " + taken), 2) << result.out << result.err;
    EXPECT_THAT(result.err, Not(HasSubstr("[W")));
    EXPECT_TRUE(command->nothing_left());
  }
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
  expect_sum(Hosts(2, {.trap = true}), "auto", "hierarchical");
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
}

TEST(JobOverHosts, NamesBothRanksOfAMismatch) {
  expect_mismatch_is_named("auto");
}

TEST(JobOverHosts, NamesBothRanksOfAMismatchOnGloo) {
  expect_mismatch_is_named("gloo");
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
  EXPECT_TRUE(first.nothing_left());
  EXPECT_TRUE(second.nothing_left());
}

/// All four ranks say `text`.
void expect_said(const Job& job, const std::string& text) {
  const Hosts hosts(2);
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
