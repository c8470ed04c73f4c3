// From SERRIED_TRACE under the launcher to one merged trace: phases, bytes, arrows, who was late, and a killed rank.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <signal.h>

#include <filesystem>
#include <map>
#include <set>

#include "tests/process/traces.h"

namespace serried::testing {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;

// Of the model in trace_worker.cpp.
constexpr int64_t kElements = 5 * 7 + 7 + 7 + 7 + 7 * 3 + 3;
constexpr int kSteps = 3;

Result run_traced(int num_ranks, const std::string& mode, const TemporaryFolder& folder) {
  return serried({"run", "-n", std::to_string(num_ranks), SERRIED_TRACE_WORKER, mode},
                 {"SERRIED_TRACE=" + folder.path()});
}

std::vector<json> slices_in(const std::string& path, int rank, const std::string& name) {
  std::vector<json> found;
  for (const json& event : of_kind(events_of(path), "X")) {
    if (event.at("pid") == rank && event.at("name").get<std::string>().starts_with(name)) found.push_back(event);
  }
  return found;
}

TEST(Traces, OfAJobAreMergedWithPhasesBytesAndArrows) {
  const TemporaryFolder folder;
  const Result run = run_traced(3, "", folder);
  ASSERT_EQ(run.exit_code, 0) << run.err;
  const Result merge = serried({"trace", "merge", folder.path()});
  ASSERT_EQ(merge.exit_code, 0) << merge.err;
  EXPECT_EQ(merge.err, "");
  const std::string path = folder.path() + "/trace.json";
  size_t num_collectives = 0;
  for (const int rank : {0, 1, 2}) {
    EXPECT_EQ(slices_in(path, rank, "forward").size(), size_t(kSteps));
    EXPECT_EQ(slices_in(path, rank, "backward").size(), size_t(kSteps));
    EXPECT_EQ(slices_in(path, rank, "step").size(), size_t(kSteps));
    int64_t bytes = 0;
    for (const json& bucket : slices_in(path, rank, "all_reduce: DDP bucket")) {
      bytes += bucket.at("args").at("bytes").get<int64_t>();
    }
    EXPECT_EQ(bytes, kSteps * kElements * 4);
    std::set<int64_t> numbers;
    for (const json& event : of_kind(events_of(path), "X")) {
      if (event.at("pid") == rank && event.at("cat") == "communication" && event.contains("args")) {
        numbers.insert(event.at("args").at("sequence").get<int64_t>());
      }
    }
    num_collectives = numbers.size();
  }
  EXPECT_EQ(of_kind(events_of(path), "s").size(), 2 * num_collectives);  // from one rank to the two others
  EXPECT_EQ(of_kind(events_of(path), "f").size(), 2 * num_collectives);
}

TEST(Traces, SayWhereTheTimeWentAndForWhomTheOthersWaited) {
  const TemporaryFolder folder;
  ASSERT_EQ(run_traced(2, "", folder).exit_code, 0);
  const Result merge = serried({"trace", "merge", folder.path(), "-o", folder.path() + "/all.json"});
  EXPECT_THAT(merge.out, AllOf(HasSubstr("rank  "), HasSubstr("\n   1  "), HasSubstr("\nall_reduce: DDP bucket 0 "),
                               ContainsRegex("\nrank [01] came last in [0-9]+ % of [0-9]+ collectives; the others "
                                             "waited [0-9.]+ (us|ms|s) for it\n")));
}

TEST(Traces, EachRankHasItsNameHostAndPid) {
  const TemporaryFolder folder;
  ASSERT_EQ(run_traced(2, "", folder).exit_code, 0);
  ASSERT_EQ(serried({"trace", "merge", folder.path()}).exit_code, 0);
  std::map<int, std::vector<std::string>> names;
  for (const json& event : of_kind(events_of(folder.path() + "/trace.json"), "M")) {
    if (event.at("name") == "process_name") names[event.at("pid")].push_back(event.at("args").at("name"));
  }
  ASSERT_EQ(names.size(), 2U);
  EXPECT_THAT(names[1], ::testing::ElementsAre(::testing::MatchesRegex("rank 1 \\(.+, pid [0-9]+\\)")));
}

TEST(Traces, OfAKilledRankAreThereAsFarAsItCame) {
  const TemporaryFolder folder;
  EXPECT_EQ(run_traced(2, "die", folder).exit_code, 128 + SIGKILL);
  const std::string killed = folder.path() + "/rank_1.json";
  EXPECT_FALSE(json::accept(read_file(killed))) << "it ended by itself";
  const Result merge = serried({"trace", "merge", folder.path()});
  ASSERT_EQ(merge.exit_code, 0) << merge.err;
  EXPECT_THAT(merge.err, HasSubstr("[trace] \"" + killed +
                                   "\" breaks off, as that of a rank that was killed or still runs: its first "));
  EXPECT_GE(slices_in(folder.path() + "/trace.json", 1, "all_reduce: DDP bucket 0").size(), 1U);
}

// What another command leaves in the folder would be mixed with the job's.
TEST(Traces, AProgramThatIsNoRankWritesNone) {
  const TemporaryFolder folder;
  EXPECT_EQ(serried({"explain", "aten::mm", "S0", "R", "--mesh", "2"}, {"SERRIED_TRACE=" + folder.path()}).exit_code,
            0);
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

}  // namespace
}  // namespace serried::testing
