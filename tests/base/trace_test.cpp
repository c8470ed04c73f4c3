// Spans, the JSON made of them, and files of several ranks joined.
#include "serried/base/trace.h"

#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <thread>

#include <nlohmann/json.hpp>

#include "serried/base/error.h"
#include "tests/support/errors.h"

namespace serried {
namespace {

using nlohmann::json;

std::string file_of(const std::string& name) {
  return ::testing::TempDir() + "serried_trace_" + std::to_string(::getpid()) + "_" + name;
}

json read(const std::string& path) {
  std::ifstream file(path);
  return json::parse(file);
}

json find(const json& trace, const std::string& name) {
  for (const json& event : trace["traceEvents"]) {
    if (event["name"] == name) return event;
  }
  return {};
}

class Trace : public ::testing::Test {
 protected:
  void SetUp() override {
    trace::start();
    trace::write(file_of("old.json"));  // forgets what other tests recorded
  }
  void TearDown() override { trace::stop(); }
};

TEST_F(Trace, SpansBecomeChromeEventsOfTheirRank) {
  std::thread([] {
    ThreadRankLabel label({.rank = 2, .world_size = 4});
    trace::Span outer("outer", "comm", 4096);
    trace::Span inner("inner");
  }).join();
  trace::write(file_of("spans.json"));
  const json trace = read(file_of("spans.json"));
  const json outer = find(trace, "outer");
  const json inner = find(trace, "inner");
  EXPECT_EQ(outer["ph"], "X");
  EXPECT_EQ(outer["pid"], 2);
  EXPECT_EQ(outer["cat"], "comm");
  EXPECT_EQ(outer["args"]["bytes"], 4096);
  EXPECT_FALSE(inner.contains("args"));
  EXPECT_EQ(inner["tid"], outer["tid"]);
  EXPECT_LE(outer["ts"].get<double>(), inner["ts"].get<double>());
  EXPECT_GE(outer["dur"].get<double>(), inner["dur"].get<double>());
}

TEST_F(Trace, SpansSayMoreByNotes) {
  {
    trace::Span span("load", "data", 7);
    span.note("file", "a.bin");
    span.note("records", 12);
  }
  trace::write(file_of("notes.json"));
  EXPECT_EQ(find(read(file_of("notes.json")), "load")["args"],
            (json{{"bytes", 7}, {"file", "a.bin"}, {"records", 12}}));
}

TEST_F(Trace, AFileSaysWhoseItIs) {
  trace::write(file_of("head.json"));
  const json head = read(file_of("head.json"))["otherData"];
  for (const char* key : {"job", "host", "clock", "world_size", "realtime_ns", "monotonic_ns"}) {
    EXPECT_TRUE(head.contains(key)) << key;
  }
}

TEST_F(Trace, RowsAreNumberedFromOneAndNamed) {
  std::thread([] {
    const ThreadRankLabel label({.rank = 1, .world_size = 4});
    ::pthread_setname_np(::pthread_self(), "loader");
    trace::Span span("work");
  }).join();
  trace::write(file_of("threads.json"));
  std::vector<std::string> names;
  const json trace = read(file_of("threads.json"));
  for (const json& event : trace["traceEvents"]) {
    if (event["name"] != "thread_name" || event["pid"] != 1) continue;
    EXPECT_EQ(event["tid"], find(trace, "work")["tid"]);
    EXPECT_EQ(event["tid"], 1);  // viewers take 0 for the system's own
    names.push_back(event["args"]["name"]);
  }
  EXPECT_EQ(names, std::vector<std::string>{"loader"});
}

TEST_F(Trace, NamesThatAreNoUtf8DoNotBreakTheFile) {
  {
    trace::Span span("work");
    span.note("file", "caf\xe9");
  }
  trace::write(file_of("names.json"));
  EXPECT_FALSE(find(read(file_of("names.json")), "work").is_null());
}

TEST_F(Trace, AForkedChildBeginsAnew) {
  { trace::Span span("of the parent"); }
  const std::string path = file_of("child.json");
  const pid_t child = ::fork();
  if (child == 0) {
    const bool is_off = !trace::enabled();
    trace::start();
    { trace::Span span("of the child"); }
    trace::write(path);
    ::_exit(is_off ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_FALSE(find(read(path), "of the child").is_null());
  EXPECT_TRUE(find(read(path), "of the parent").is_null());
  trace::write(file_of("parent.json"));
  EXPECT_FALSE(find(read(file_of("parent.json")), "of the parent").is_null());
}

TEST_F(Trace, AFullDiskIsNamed) {
  EXPECT_EQ(testing::error_text<c10::ValueError>([] { trace::write("/dev/full"); }),
            "[trace] cannot write all of \"/dev/full\": No space left on device\n"
            "  fix: make room on its disk, or trace fewer steps: trace::start() and trace::stop()");
}

TEST_F(Trace, EachRankHasANamedProcessRow) {
  {
    ThreadRankLabel label({.rank = 3, .world_size = 4});
    trace::Span span("work");
  }
  trace::write(file_of("rows.json"));
  std::vector<std::string> names;
  const json trace = read(file_of("rows.json"));
  for (const json& event : trace["traceEvents"]) {
    if (event["name"] == "process_name" && event["pid"] == 3) names.push_back(event["args"]["name"]);
  }
  const std::string end = ", pid " + std::to_string(::getpid()) + ")";
  ASSERT_EQ(names.size(), 1U);
  EXPECT_THAT(names[0], ::testing::AllOf(::testing::StartsWith("rank 3 ("), ::testing::EndsWith(end)));
}

TEST_F(Trace, NothingIsRecordedWhenStopped) {
  trace::stop();
  { trace::Span span("unseen"); }
  trace::write(file_of("stopped.json"));
  EXPECT_TRUE(find(read(file_of("stopped.json")), "unseen").is_null());
}

TEST_F(Trace, MergePutsFilesOnOneClock) {
  const auto rank_file = [](int rank, int64_t realtime_ns, double ts) {
    return json{
        {"otherData", {{"realtime_ns", realtime_ns}, {"monotonic_ns", 0}}},
        {"traceEvents",
         {{{"name", "step" + std::to_string(rank)}, {"ph", "X"}, {"pid", rank}, {"tid", 0}, {"ts", ts}, {"dur", 1}}}}};
  };
  std::ofstream(file_of("a.json")) << rank_file(0, 5'000'000, 100.0);
  std::ofstream(file_of("b.json")) << rank_file(1, 7'000'000, 100.0);  // its clock began 2 ms later
  trace::merge({file_of("a.json"), file_of("b.json")}, file_of("all.json"));
  const json all = read(file_of("all.json"));
  EXPECT_DOUBLE_EQ(find(all, "step0")["ts"], 0.0);
  EXPECT_DOUBLE_EQ(find(all, "step1")["ts"], 2000.0);
}

TEST_F(Trace, WrittenFilesCanBeMerged) {
  { trace::Span span("kept"); }
  trace::write(file_of("one.json"));
  trace::merge({file_of("one.json")}, file_of("joined.json"));
  EXPECT_EQ(find(read(file_of("joined.json")), "kept")["ph"], "X");
}

TEST_F(Trace, UnwritablePathIsNamed) {
  EXPECT_EQ(testing::error_text<c10::ValueError>([] { trace::write("/no/such/folder/t.json"); }),
            "[trace] cannot write \"/no/such/folder/t.json\": No such file or directory\n"
            "  fix: pass a path in a folder that exists and is writable");
}

TEST_F(Trace, MergeRefusesWhatIsNoTrace) {
  std::ofstream(file_of("bad.json")) << "hello";
  EXPECT_EQ(testing::error_text<c10::ValueError>([] { trace::merge({file_of("bad.json")}, file_of("out.json")); }),
            "[trace] \"" + file_of("bad.json") +
                "\" is not a trace that serried wrote\n"
                "  fix: pass files that SERRIED_TRACE=<folder> or trace::write made");
}

}  // namespace
}  // namespace serried
