// Traces of several ranks made one: arrows, clocks and sums, from files made by hand.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>

#include "serried/base/traces/half_file.h"
#include "serried/base/traces/merge.h"
#include "tests/process/traces.h"

namespace serried::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using trace::MergeReport;

MergeReport merge(const TemporaryFolder& folder) {
  return trace::merge_traces({.inputs = {folder.path()}, .output = folder.path() + "/trace.json"});
}

std::vector<json> merged(const TemporaryFolder& folder) {
  return events_of(folder.path() + "/trace.json");
}

double begin_of(const std::vector<json>& events, int rank, const std::string& name) {
  for (const json& event : events) {
    if (event.at("ph") == "X" && event.at("pid") == rank && event.at("name") == name) return event.at("ts");
  }
  ADD_FAILURE() << "no " << name << " of rank " << rank;
  return -1;
}

// Ranks 0 and 1 come at 10 and 20, rank 2 at 70; all are through at 80.
void write_late_rank(const TemporaryFolder& folder) {
  const double begins[] = {10, 20, 70};
  for (const int rank : {0, 1, 2}) {
    HandMade trace{.rank = rank, .world_size = 3};
    trace.add_collective(1, begins[rank], begins[rank], 80);
    trace.write_to(folder);
  }
}

TEST(TraceMerge, ASignalLeavesNoHalfFile) {
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    const TemporaryFolder folder;
    const auto write_and_raise = [&] {
      const trace::HalfFile half(folder.path() + "/trace.json");
      std::ofstream(half.path()) << "{";
      if (std::filesystem::exists(half.path())) std::raise(signal);
    };
    EXPECT_EXIT(write_and_raise(), ::testing::KilledBySignal(signal), "");
    EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
  }
}

TEST(TraceMerge, ArrowsGoFromTheRankThatCameLastToTheOthers) {
  const TemporaryFolder folder;
  write_late_rank(folder);
  merge(folder);
  const std::vector<json> events = merged(folder);
  const std::vector<json> from = of_kind(events, "s"), to = of_kind(events, "f");
  ASSERT_EQ(from.size(), 2U);
  ASSERT_EQ(to.size(), 2U);
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(from[i].at("pid"), 2);
    EXPECT_EQ(from[i].at("tid"), 2);
    EXPECT_EQ(from[i].at("ts"), 60);  // the first event of all begins at 0
    EXPECT_EQ(to[i].at("pid"), int(i));
    EXPECT_EQ(to[i].at("tid"), 2);
    EXPECT_EQ(to[i].at("bp"), "e");
    EXPECT_EQ(to[i].at("ts"), 65);  // inside the slice, which ends at 70
    EXPECT_EQ(to[i].at("id"), from[i].at("id"));
  }
  EXPECT_NE(from[0].at("id"), from[1].at("id"));
}

// Names and nests of a file that somebody made to harm its reader.
TEST(TraceMerge, HostileFilesDoNoHarm) {
  const TemporaryFolder folder;
  for (const int rank : {0, 1}) {
    HandMade trace{.rank = rank};
    trace.add_collective(1, 0, 0, 10,
                         "\xc2\x9b"
                         "31m\x1b[2J");
    trace.add("deep", "forward", 20, 30, {{"nest", "HERE"}});
    std::string text = trace.text();
    constexpr size_t kDepth = 200'000;
    text.replace(text.find("\"HERE\""), 6, std::string(kDepth, '[') + std::string(kDepth, ']'));
    write_file(folder.path() + "/rank_" + std::to_string(rank) + ".json", text);
  }
  EXPECT_THAT(trace::to_text(merge(folder).summary), HasSubstr("\n??31m?[2J "));
  EXPECT_EQ(begin_of(merged(folder), 0, "deep"), 20);
}

TEST(TraceMerge, TheRankThatTheOthersWaitedForIsNamed) {
  const TemporaryFolder folder;
  write_late_rank(folder);
  const trace::Summary summary = merge(folder).summary;
  EXPECT_EQ(summary.num_collectives, 1);
  EXPECT_EQ(summary.latest.rank, 2);
  EXPECT_EQ(summary.latest.num_last, 1);
  EXPECT_DOUBLE_EQ(summary.latest.waited, 60 + 50);
  EXPECT_THAT(trace::to_text(summary),
              HasSubstr("\nrank 2 came last in 100 % of 1 collectives; the others waited 110 us for it\n"));
}

TEST(TraceMerge, WhoWorksMeanwhileDoesNotWait) {
  const TemporaryFolder folder;
  HandMade early{.rank = 0}, late{.rank = 1};
  early.add_collective(1, 10, 60, 80);  // asynchronous: it waits from 60 on
  late.add_collective(1, 70, 70, 80);
  early.write_to(folder);
  late.write_to(folder);
  EXPECT_DOUBLE_EQ(merge(folder).summary.latest.waited, 10);
}

TEST(TraceMerge, TimesAreAddedUpByPhase) {
  const TemporaryFolder folder;
  HandMade trace{.rank = 0};
  trace.add("forward", "forward", 0, 100);
  trace.add("buffers", "communication", 15, 35);  // around collectives
  trace.add_collective(1, 20, 20, 30, "broadcast: DDP's buffers");
  trace.add("backward", "backward", 100, 200);
  trace.add_collective(2, 150, 200, 260, "all_reduce: DDP bucket 0");
  trace.add_collective(3, 160, 260, 270, "all_reduce: DDP bucket 1");
  trace.add("step", "optimizer", 270, 300);
  trace.write_to(folder);
  const trace::Summary summary = merge(folder).summary;
  ASSERT_EQ(summary.ranks.size(), 1U);
  const trace::RankSummary& rank = summary.ranks[0];
  EXPECT_DOUBLE_EQ(rank.whole, 300);
  EXPECT_DOUBLE_EQ(rank.forward, 90);
  EXPECT_DOUBLE_EQ(rank.backward, 100);
  EXPECT_DOUBLE_EQ(rank.optimizer, 30);
  EXPECT_DOUBLE_EQ(rank.communication, 10 + 120);
  EXPECT_DOUBLE_EQ(rank.waiting, 10 + 70);
  EXPECT_DOUBLE_EQ(rank.hidden, 50);
  EXPECT_EQ(rank.bytes, 3000);
}

TEST(TraceMerge, TheSummaryIsATable) {
  const TemporaryFolder folder;
  write_late_rank(folder);
  EXPECT_EQ(trace::to_text(merge(folder).summary),
            "rank   time  forward  backward  optimizer  communication  hidden  waiting   bytes\n"
            "   0  70 us     0 us      0 us       0 us          70 us     0 %    70 us  1000 B\n"
            "   1  60 us     0 us      0 us       0 us          60 us     0 %    60 us  1000 B\n"
            "   2  10 us     0 us      0 us       0 us          10 us     0 %    10 us  1000 B\n"
            "\n"
            "collective  calls   bytes   time  waiting             last\n"
            "all_reduce      1  1000 B  70 us   110 us  rank 2 in 100 %\n"
            "\n"
            "rank 2 came last in 100 % of 1 collectives; the others waited 110 us for it\n");
}

// The clock of host b is half a second ahead of what its ranks could have known.
TEST(TraceMerge, ClocksOfHostsAreAlignedByCollectives) {
  const TemporaryFolder folder;
  HandMade a{.rank = 0}, b{.rank = 1, .host = "b", .clock = "clock b", .realtime_ns = 500'000'000};
  a.add_collective(1, 100, 100, 200);  // b: 150 to 210
  b.add_collective(1, 150, 150, 210);
  a.add_collective(2, 300, 300, 310);
  b.add_collective(2, 302, 302, 312);
  a.write_to(folder);
  b.write_to(folder);
  const MergeReport report = merge(folder);
  EXPECT_THAT(report.remarks, ElementsAre("the clock of b is moved by -500.002 ms to that of a, +- 0.010 ms, by 2 "
                                          "collectives"));
  const std::vector<json> events = merged(folder);
  EXPECT_NEAR(begin_of(events, 1, "all_reduce") - begin_of(events, 0, "all_reduce"), 50, 10);
  EXPECT_EQ(report.summary.latest.rank, 1);
}

TEST(TraceMerge, ClocksThatContradictNothingStay) {
  const TemporaryFolder folder;
  HandMade a{.rank = 0}, b{.rank = 1, .host = "b", .clock = "clock b", .realtime_ns = 2'000};
  a.add_collective(1, 100, 100, 200);
  b.add_collective(1, 150, 150, 199);
  a.write_to(folder);
  b.write_to(folder);
  EXPECT_THAT(merge(folder).remarks, IsEmpty());
  const std::vector<json> events = merged(folder);
  EXPECT_DOUBLE_EQ(begin_of(events, 1, "all_reduce") - begin_of(events, 0, "all_reduce"), 52);
}

json measured(int rank, int64_t offset_ns, int64_t error_ns) {
  return {{"name", "serried_clock"},
          {"ph", "M"},
          {"pid", rank},
          {"tid", 0},
          {"args", {{"offset_ns", offset_ns}, {"error_ns", error_ns}}}};
}

// The time of day of b is 5 ms off, which no collective shows; a's launcher is not node 0's.
TEST(TraceMerge, WhatLaunchersMeasuredSetsTheClocksOfHosts) {
  const TemporaryFolder folder;
  HandMade a{.rank = 0}, b{.rank = 1, .host = "b", .clock = "clock b", .realtime_ns = 5'000'000};
  a.add_collective(1, 100, 100, 20'000);
  b.add_collective(1, 150, 150, 20'050);
  a.events.push_back(measured(0, 1'000'000, 1'000));
  b.events.push_back(measured(1, 9'999'999, 90'000));
  b.events.push_back(measured(1, 1'300'000, 2'000));
  b.events.push_back(measured(1, 9'999'999, 3'000));
  a.write_to(folder);
  b.write_to(folder);
  EXPECT_THAT(merge(folder).remarks, ElementsAre("the clock of b is 0.300 ms behind that of a, +- 0.003 ms, as their "
                                                 "launchers have measured"));
  const std::vector<json> events = merged(folder);
  EXPECT_NEAR(begin_of(events, 1, "all_reduce") - begin_of(events, 0, "all_reduce"), 350, 1e-6);
}

TEST(TraceMerge, MeasurementsThatMakeNoSenseCountForNothing) {
  const TemporaryFolder folder;
  HandMade a{.rank = 0}, b{.rank = 1, .host = "b", .clock = "clock b", .realtime_ns = 2'000};
  a.add_collective(1, 100, 100, 200);
  b.add_collective(1, 150, 150, 199);
  a.events.push_back(measured(0, 0, 0));
  b.events.push_back(measured(1, 5'000, -1));
  b.events.push_back(measured(1, INT64_MAX, 1));
  b.events.push_back({{"name", "serried_clock"}, {"ph", "M"}, {"pid", 1}, {"args", "none"}});
  a.write_to(folder);
  b.write_to(folder);
  EXPECT_THAT(merge(folder).remarks, IsEmpty());
  const std::vector<json> events = merged(folder);
  EXPECT_DOUBLE_EQ(begin_of(events, 1, "all_reduce") - begin_of(events, 0, "all_reduce"), 52);
}

// By 200 us in one collective, by 400 us in the next.
TEST(TraceMerge, ClocksThatDriftAreMovedByTheMean) {
  const TemporaryFolder folder;
  HandMade a{.rank = 0}, b{.rank = 1, .host = "b", .clock = "clock b"};
  a.add_collective(1, 100, 100, 110);
  b.add_collective(1, 300, 300, 310);
  a.add_collective(2, 1000, 1000, 1010);
  b.add_collective(2, 1400, 1400, 1410);
  a.write_to(folder);
  b.write_to(folder);
  EXPECT_THAT(merge(folder).remarks, ElementsAre("the clock of b is moved by -0.300 ms to that of a, +- 0.090 ms, by 2 "
                                                 "collectives; the clocks drift"));
}

// A broadcast bounds nothing: its root may be through before the others come.
TEST(TraceMerge, OnlyCollectivesThatWaitForAllAlignClocks) {
  const TemporaryFolder folder;
  HandMade a{.rank = 0}, b{.rank = 1, .host = "b", .clock = "clock b"};
  a.add_collective(1, 100, 100, 110, "broadcast");
  b.add_collective(1, 500, 500, 510, "broadcast");
  a.write_to(folder);
  b.write_to(folder);
  EXPECT_THAT(merge(folder).remarks, IsEmpty());
}

TEST(TraceMerge, RanksOfOneHostShareItsClockWhateverTheTimeOfDayDoes) {
  const TemporaryFolder folder;
  HandMade a{.rank = 0, .realtime_ns = 1'000'000}, b{.rank = 1, .realtime_ns = 9'000'000};
  a.add("forward", "forward", 100, 200);
  b.add("forward", "forward", 150, 200);
  a.write_to(folder);
  b.write_to(folder);
  merge(folder);
  EXPECT_DOUBLE_EQ(begin_of(merged(folder), 0, "forward"), 0);
  EXPECT_DOUBLE_EQ(begin_of(merged(folder), 1, "forward"), 50);
}

TEST(TraceMerge, AFileThatBreaksOffGivesWhatIsWhole) {
  const TemporaryFolder folder;
  HandMade whole{.rank = 0}, broken{.rank = 1};
  whole.add("forward", "forward", 0, 10);
  broken.add("forward", "forward", 0, 10);
  broken.add("backward", "backward", 10, 20);
  broken.add("step", "optimizer", 20, 30);
  whole.write_to(folder);
  const std::string path = broken.write_to(folder);
  const std::string text = read_file(path);
  write_file(path, text.substr(0, text.rfind("optimizer")));
  EXPECT_THAT(merge(folder).remarks, ElementsAre("\"" + path +
                                                 "\" breaks off, as that of a rank that was killed or still runs: its "
                                                 "first 2 events are taken"));
  const std::vector<json> events = merged(folder);
  EXPECT_DOUBLE_EQ(begin_of(events, 1, "backward"), 10);
  EXPECT_EQ(of_kind(events, "X").size(), 3U);
}

TEST(TraceMerge, MissingRanksAndOtherFilesAreNamed) {
  const TemporaryFolder folder;
  HandMade only{.rank = 1, .world_size = 4};
  only.add("forward", "forward", 0, 10);
  only.write_to(folder);
  write_file(folder.path() + "/rank_2.json", "");
  write_file(folder.path() + "/package.json", R"({"name": "other"})");
  EXPECT_THAT(merge(folder).remarks,
              ElementsAre("\"" + folder.path() + "/package.json\" is left out: it is not a trace that serried wrote",
                          "\"" + folder.path() + "/rank_2.json\" is left out: it is not a trace that serried wrote",
                          "ranks 0, 2, 3 of 4 have no trace here: killed before there was one, or it is elsewhere"));
}

TEST(TraceMerge, MergingAgainGivesTheSame) {
  const TemporaryFolder folder;
  write_late_rank(folder);
  merge(folder);
  const std::string first = read_file(folder.path() + "/trace.json");
  EXPECT_THAT(merge(folder).remarks, IsEmpty());
  EXPECT_EQ(read_file(folder.path() + "/trace.json"), first);
}

TEST(TraceMerge, RanksWithoutANameGetOne) {
  const TemporaryFolder folder;
  HandMade trace{.rank = 0, .world_size = 1};
  trace.add("forward", "forward", 0, 10);
  trace.write_to(folder);
  merge(folder);
  const std::vector<json> names = of_kind(merged(folder), "M");
  ASSERT_EQ(names.size(), 1U);
  EXPECT_EQ(names[0].at("args").at("name"), "rank 0 (a)");
}

// Numbers that cannot be those of one collective: an arrow would be a lie.
TEST(TraceMerge, WhatDoesNotFitTogetherHasNoArrows) {
  const TemporaryFolder folder;
  for (const int rank : {0, 1, 2}) {
    HandMade trace{.rank = rank};  // three ranks in a group of two
    trace.add_collective(1, 10, 10, 20);
    trace.add_collective(0, 30, 30, 40, "send");
    trace.write_to(folder);
  }
  const trace::Summary summary = merge(folder).summary;
  EXPECT_THAT(of_kind(merged(folder), "s"), IsEmpty());
  EXPECT_EQ(summary.num_collectives, 0);
  EXPECT_EQ(summary.latest.rank, -1);
}

TEST(TraceMerge, AFailedCollectiveIsNobodysDelay) {
  const TemporaryFolder folder;
  HandMade a{.rank = 0}, b{.rank = 1};
  a.add_collective(1, 10, 10, 90);
  b.add_collective(1, 80, 80, 90);
  a.events[0]["args"]["failed"] = 1;
  a.write_to(folder);
  b.write_to(folder);
  EXPECT_EQ(merge(folder).summary.num_collectives, 0);
}

TEST(TraceMerge, EventsOfUnexpectedTypesDoNoHarm) {
  const TemporaryFolder folder;
  HandMade trace{.rank = 0, .world_size = 1};
  trace.add("forward", "forward", 0, 10);
  trace.events.push_back({{"ph", 7}, {"pid", "zero"}, {"ts", "late"}});
  trace.events.push_back({{"ph", "X"}, {"pid", 0}, {"ts", json::array()}, {"dur", -5}, {"args", "none"}, {"cat", 1}});
  trace.events.push_back({{"ph", "X"}, {"pid", 0}, {"ts", 5}, {"cat", "communication"}, {"args", {{"group", 5}}}});
  trace.events.push_back(17);
  trace.write_to(folder);
  EXPECT_DOUBLE_EQ(merge(folder).summary.ranks.at(0).forward, 10);
}

TEST(TraceMerge, NamesCannotCommandTheTerminal) {
  const TemporaryFolder folder;
  for (const int rank : {0, 1}) {
    HandMade trace{.rank = rank};
    trace.add_collective(1, 10 * rank, 10 * rank, 20, "all_reduce\x1b[31m");
    trace.write_to(folder);
  }
  EXPECT_THAT(trace::to_text(merge(folder).summary), HasSubstr("all_reduce?[31m"));
}

}  // namespace
}  // namespace serried::testing
