// Dumps and the page that is made of them: from values, without ranks of LibTorch.
#include "serried/launch/dump.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>

#include "serried/launch/seen_json.h"
#include "tests/process/command.h"
#include "tools/serried/debug/groups.h"
#include "tools/serried/debug/page.h"

namespace serried::debug {
namespace {

using launch::CallSeen;
using launch::GroupSeen;
using launch::HostSeen;
using launch::RankSeen;
using serried::testing::Result;
using serried::testing::serried;
using serried::testing::TemporaryFolder;
using serried::testing::write_file;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;
using ::testing::StartsWith;

constexpr int64_t kMillisecond = 1'000'000;
constexpr int64_t kNow = 1'000'000 * kMillisecond;

CallSeen call(uint64_t sequence, const std::string& what, int64_t begun_ms, bool done = true) {
  CallSeen seen{.sequence = sequence, .text = "#" + std::to_string(sequence) + " " + what, .group = 1};
  seen.issued_ns = seen.begun_ns = begun_ms * kMillisecond;
  if (done) seen.ended_ns = seen.begun_ns + kMillisecond;
  return seen;
}

/// A rank of one group of `world_size`.
RankSeen rank_with(int rank, int world_size, const std::vector<CallSeen>& calls) {
  GroupSeen group{.id = 1, .name = "shm/ab12/1", .rank = rank, .world_size = world_size, .job_rank = rank};
  for (const CallSeen& each : calls) {
    if (each.sequence > group.newest.sequence) group.newest = each;
    if (each.ended_ns != 0) group.ended_sequence = std::max(group.ended_sequence, each.sequence);
  }
  return {.rank = rank, .pid = 100 + rank, .state = 'S', .groups = {group}, .num_calls = calls.size(), .calls = calls};
}

HostSeen host(const std::string& name, int node, std::vector<RankSeen> ranks, int world_size) {
  return {.version = "serried 1",
          .host = name,
          .node = node,
          .job = "ab12",
          .world_size = world_size,
          .why = "rank 1 failed",
          .now_ns = kNow,
          .ranks = std::move(ranks)};
}

TEST(DebugPage, NamesTheFirstCallThatDiffersAndShowsThoseAround) {
  const std::string sum = "all_reduce f32[512] sum", other = "all_reduce f32[256] sum";
  const HostSeen dump = host("h1", 0,
                             {rank_with(0, 2, {call(1, "barrier", 1), call(2, sum, 2), call(3, sum, 3, false)}),
                              rank_with(1, 2, {call(1, "barrier", 1), call(2, sum, 2), call(3, other, 3, false)})},
                             2);
  const std::string page = page_of({dump}, {});
  EXPECT_THAT(page, StartsWith("job ab12, attempt 0: 2 ranks, a dump by serried 1\nmade because rank 1 failed\n"
                               "host h1: node 0, ranks 0, 1\n\ngroup shm/1: ranks 0, 1\n"
                               "  the first call that differs is #3\n"));
  EXPECT_THAT(page, HasSubstr("    #1 barrier: ranks 0, 1 done\n"));
  EXPECT_THAT(page, HasSubstr("    #2 all_reduce f32[512] sum: ranks 0, 1 done\n"));
  EXPECT_THAT(page, HasSubstr("  > #3 all_reduce f32[256] sum: rank 1 in it for 17 min | "
                              "all_reduce f32[512] sum: rank 0 in it for 17 min\n"));
  EXPECT_THAT(page, HasSubstr("rank 1 (pid 101) sleeps, 3 calls\n"));
}

TEST(DebugPage, SizesThatMayDifferDoNotCount) {
  CallSeen two = call(1, "all_gather f32[2]", 1), three = call(1, "all_gather f32[3]", 1);
  two.agreed = three.agreed = "#1 all_gather f32";
  const HostSeen dump = host("h1", 0, {rank_with(0, 2, {two}), rank_with(1, 2, {three})}, 2);
  EXPECT_EQ(first_difference(groups_of({dump})[0]), 0U);
}

TEST(DebugPage, NamesWhoHasNotComeAcrossHosts) {
  const std::vector<HostSeen> dumps = {
      host("h1", 0, {rank_with(0, 3, {call(1, "barrier", 1), call(2, "barrier", 9, false)})}, 3),
      host("h2", 1,
           {rank_with(1, 3, {call(1, "barrier", 1)}),
            rank_with(2, 3, {call(1, "barrier", 1), call(2, "barrier", 9, false)})},
           3)};
  const std::string page = page_of(dumps, {});
  EXPECT_THAT(page, HasSubstr("2 dumps by serried 1"));
  EXPECT_THAT(page, HasSubstr("host h2: node 1, ranks 1, 2; its clock was not compared with node 0's\n"));
  EXPECT_THAT(page, HasSubstr("group shm/1: ranks 0-2\n  rank 1 has not come to #2\n"));
  EXPECT_THAT(page, HasSubstr("  > #2 rank 1 not come | barrier: ranks 0, 2 in it for 17 min\n"));
}

TEST(DebugPage, NamesWhoIsLateOnOneClock) {
  std::vector<CallSeen> punctual, late;
  for (uint64_t i = 1; i <= 9; ++i) {
    punctual.push_back(call(i, "barrier", int64_t(100 * i)));
    late.push_back(call(i, "barrier", int64_t(100 * i) + 7 + 5000));  // and its clock goes 5 s ahead
  }
  HostSeen ahead = host("h2", 1, {rank_with(1, 2, late)}, 2);
  ahead.has_clock = true;
  ahead.clock_offset_ns = -5000 * kMillisecond;
  ahead.clock_error_ns = kMillisecond;
  const std::vector<HostSeen> dumps = {host("h1", 0, {rank_with(0, 2, punctual)}, 2), ahead};
  const Lateness latest = latest_of(groups_of(dumps)[0]);
  EXPECT_EQ(latest.rank, 1);
  EXPECT_NEAR(latest.seconds, 0.007, 1e-6);
  EXPECT_EQ(latest.num_last, 9);
  EXPECT_EQ(latest.num_calls, 9);
  EXPECT_THAT(page_of(dumps, {}), HasSubstr("  rank 1 is late: 7.000 ms after the first in the middle of 9 calls, "
                                            "the last to 9\n"));
}

TEST(DebugPage, NamesRanksWithoutAFileAndFilesThatAreNone) {
  const HostSeen dump = host("h1", 0, {rank_with(0, 3, {call(1, "barrier", 1, false)})}, 3);
  const std::string page = page_of({dump}, {"h3.json is no dump: it is no JSON, or has broken off"});
  EXPECT_THAT(page, HasSubstr("h3.json is no dump: it is no JSON, or has broken off\n"));
  EXPECT_THAT(page, HasSubstr("no dump has ranks 1, 2: get the files of the other hosts\n"));
  EXPECT_THAT(page, HasSubstr("  nothing is known of ranks 1, 2 of the group\n"));
}

TEST(DebugPage, ShowsMessagesStacksAndWhatIsForgotten) {
  RankSeen rank = rank_with(0, 2, {call(5000, "barrier", 1)});
  rank.num_calls = 5003;
  rank.calls.push_back({.text = "recv f32[3] from rank 1", .group = 1, .issued_ns = kNow - 2000 * kMillisecond});
  for (int i = 0; i < 20; ++i) rank.stack += "#" + std::to_string(i) + " frame\n";
  const std::string page = page_of({host("h1", 0, {rank}, 2)}, {});
  EXPECT_THAT(page, HasSubstr("  rank 0 has not finished recv f32[3] from rank 1, called 2.0 s before\n"));
  EXPECT_THAT(page, HasSubstr("5003 calls, of which the first 5001 are forgotten\n    #0 frame\n"));
  EXPECT_THAT(page, AllOf(HasSubstr("    #11 frame\n    ...\n"), Not(HasSubstr("#12 frame"))));
}

TEST(Dumps, AreWrittenWholeAndReadInTheOrderOfNodes) {
  const TemporaryFolder folder;
  const std::string inner = folder.path() + "/logs/dump";
  EXPECT_EQ(launch::write_dump(host("b", 1, {}, 2), inner, 2), inner + "/b.1.json");
  EXPECT_EQ(launch::write_dump(host("a/b", 2, {}, 2), inner, 2), inner + "/a_b.2.json");
  EXPECT_EQ(launch::write_dump(host("c", 0, {}, 2), inner, 1), inner + "/c.json");
  write_file(inner + "/broken.json", launch::to_json(host("d", 3, {}, 2)).substr(0, 40));
  write_file(inner + "/other.txt", "no dump");
  std::vector<std::string> problems;
  std::vector<std::string> hosts;
  for (const HostSeen& dump : launch::read_dumps(inner, problems)) hosts.push_back(dump.host);
  EXPECT_THAT(hosts, ElementsAre("c", "b", "a/b"));
  EXPECT_THAT(problems, ElementsAre("broken.json is no dump: it is no JSON, or has broken off"));
  EXPECT_THROW(launch::write_dump(host("b", 1, {}, 2), folder.path() + "/logs/dump/c.json", 1), std::runtime_error);
}

TEST(Dumps, AFailedJobLeavesOne) {
  const TemporaryFolder folder;
  const Result result =
      serried({"run", "-n", "2", "--log-dir", folder.path(), "sh", "-c", "[ $RANK = 1 ] && exit 7; sleep 100"});
  EXPECT_EQ(result.exit_code, 7);
  std::vector<std::string> problems;
  const std::vector<HostSeen> dumps = launch::read_dumps(folder.path() + "/dump", problems);
  EXPECT_THAT(problems, IsEmpty());
  ASSERT_THAT(dumps, SizeIs(1));
  EXPECT_EQ(dumps[0].world_size, 2);
  EXPECT_THAT(dumps[0].why, StartsWith("rank 1 "));
  ASSERT_THAT(dumps[0].ranks, SizeIs(2));
  EXPECT_EQ(dumps[0].ranks[1].state, 'Z');
  EXPECT_NE(dumps[0].ranks[0].state, 'Z');
  EXPECT_GT(dumps[0].ranks[0].pid, 0);
}

TEST(Dumps, AJobThatEndsWellLeavesNone) {
  const TemporaryFolder folder;
  EXPECT_EQ(serried({"run", "-n", "2", "--log-dir", folder.path(), "true"}).exit_code, 0);
  EXPECT_FALSE(std::filesystem::exists(folder.path() + "/dump"));
}

TEST(DebugCommand, SaysWhereThereIsNoDump) {
  const TemporaryFolder folder;
  const Result result = serried({"debug", "show", folder.path()});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_EQ(result.err, "[debug] there is no dump in " + folder.path() +
                            "\n  fix: name the folder that serried run --log-dir logs has made, logs/dump, or serried "
                            "debug dump\n");
  EXPECT_THAT(serried({"debug", "show", "/does/not/exist"}).err,
              HasSubstr("there is no dump in /does/not/exist; /does/not/exist: No such file or directory"));
}

TEST(DebugCommand, ListsWhatItCanDo) {
  EXPECT_THAT(serried({"--help"}).out, HasSubstr("debug"));
  EXPECT_THAT(serried({"debug"}).out, AllOf(HasSubstr("dump"), HasSubstr("show")));
  EXPECT_THAT(serried({"debug", "dump", "--help"}).out, HasSubstr("--stacks-within"));
  EXPECT_EQ(serried({"debug", "dump", "--stacks-within", "x"}).exit_code, 2);
}

}  // namespace
}  // namespace serried::debug
