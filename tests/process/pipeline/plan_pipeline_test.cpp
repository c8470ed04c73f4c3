// `serried plan --pipeline` as it is typed, with all the mistakes that can be made.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "tests/process/command.h"

namespace serried::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

Result plan(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), "plan");
  return serried(arguments);
}

std::string plan_refusal(std::vector<std::string> arguments) {
  const Result result = plan(std::move(arguments));
  EXPECT_EQ(result.exit_code, 2) << result.err;
  EXPECT_EQ(result.out, "");
  return result.err;
}

TEST(PlanPipeline, PrintsTheTimetableAndWhatItCosts) {
  const Result result = plan({"--pipeline", "1f1b", "--stages", "2", "--microbatches", "3"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(result.out,
            "1F1B: 2 ranks, 2 stages, 3 micro-batches\n"
            "\n"
            "time      0    1    2    3    4    5    6    7    8    9   10   11\n"
            "rank 0  0F0  0F1    .    .  0B0    -  0F2  0B1    -    .  0B2    -\n"
            "rank 1    .  1F0  1B0    -  1F1  1B1    -  1F2  1B2    -    .    .\n"
            "\n"
            "rank  stages  works  waits  most in flight\n"
            "   0       0      9      3               2\n"
            "   1       1      9      3               1\n"
            "\n"
            "makespan 12, bubble 25.0 %\n");
}

TEST(PlanPipeline, StagesSayHowManyRanksThereAre) {
  const Result result = plan({"--pipeline", "zbv", "--stages", "8", "--microbatches", "16"});
  EXPECT_THAT(result.out, AllOf(StartsWith("ZBV: 4 ranks, 8 stages, 16 micro-batches\n"),
                                HasSubstr("makespan 99, bubble 3.0 %\n")));
  EXPECT_THAT(plan({"--pipeline=GPipe", "--ranks", "4"}).out,
              StartsWith("GPipe: 4 ranks, 4 stages, 8 micro-batches\n"));
  EXPECT_THAT(plan({"--pipeline=dualpipev", "--ranks", "2"}).out,
              StartsWith("DualPipeV: 2 ranks, 4 stages, 8 micro-batches\n"));
  EXPECT_THAT(plan({"--pipeline=interleaved", "--ranks", "2", "--stages", "6"}).out,
              StartsWith("Interleaved: 2 ranks, 6 stages, 8 micro-batches\n"));
}

TEST(PlanPipeline, WritesPicturesAndTheTable) {
  const TemporaryFolder folder;
  const std::string base = folder.path() + "/steps";
  const Result result = plan({"--pipeline", "looped-bfs", "--stages", "4", "--svg", base + ".svg", "--html",
                              base + ".html", "--csv", base + ".csv"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(read_file(base + ".svg"), AllOf(StartsWith("<svg xmlns="), HasSubstr("<title>F s3 m7: rank 1, ")));
  EXPECT_THAT(read_file(base + ".html"), AllOf(StartsWith("<!doctype html>"), HasSubstr("</html>\n")));
  EXPECT_THAT(read_file(base + ".csv"), StartsWith("0F0,0F1,"));
  const Result again = plan({"--pipeline", base + ".csv"});
  EXPECT_EQ(again.out.substr(again.out.find('\n')), result.out.substr(result.out.find('\n')));
}

TEST(PlanPipeline, HelpTellsOfBothKindsOfPlan) {
  EXPECT_THAT(plan({"--help"}).out, HasSubstr("serried plan --pipeline --help"));
  EXPECT_THAT(
      plan({"--pipeline", "zbv", "--help"}).out,
      AllOf(HasSubstr("InterleavedZeroBubble"), HasSubstr("--microbatches"), Not(HasSubstr("--tensor-parallel"))));
}

TEST(PlanPipeline, AnUnknownScheduleIsAnsweredWithTheKnownOnes) {
  EXPECT_EQ(plan_refusal({"--pipeline", "zbx", "--stages", "8"}),
            "[pipeline_table] unknown schedule \"zbx\"; known: GPipe, 1F1B, Interleaved, LoopedBFS, "
            "InterleavedZeroBubble, ZBV, DualPipeV\n  fix: pass one of the known names\n");
}

TEST(PlanPipeline, SizesThatDoNotFitAreNamed) {
  EXPECT_EQ(plan_refusal({"--pipeline", "zbv"}), "[plan] no size is given\n  fix: pass --stages, --ranks or both\n");
  EXPECT_EQ(plan_refusal({"--pipeline", "zbv", "--stages", "8", "--ranks", "8"}),
            "[plan] --stages 8 does not fit --ranks 8: ZBV puts 2 on each rank\n  fix: pass --stages 16\n");
  EXPECT_EQ(plan_refusal({"--pipeline", "zbv", "--stages", "7"}),
            "[plan] --stages 7 does not fit: ZBV puts 2 on each rank\n  fix: pass --stages 8\n");
  EXPECT_EQ(plan_refusal({"--pipeline", "zbv", "--stages", "1"}),
            "[plan] --stages 1 does not fit: ZBV puts 2 on each rank\n  fix: pass --stages 2\n");
  EXPECT_EQ(plan_refusal({"--pipeline", "gpipe", "--stages", "8", "--ranks", "4"}),
            "[plan] --stages 8 does not fit --ranks 4: GPipe puts 1 on each rank\n  fix: pass --stages 4\n");
  EXPECT_EQ(plan_refusal({"--pipeline", "interleaved", "--stages", "9", "--ranks", "4"}),
            "[plan] --stages 9 does not fit --ranks 4: Interleaved puts equally many on each rank\n"
            "  fix: pass --stages 8\n");
  EXPECT_EQ(plan_refusal({"--pipeline", "interleaved", "--stages", "9"}),
            "[plan] --stages 9 does not fit: Interleaved puts 2 on each rank, unless --ranks is given\n"
            "  fix: pass --stages 10\n");
  EXPECT_EQ(plan_refusal({"--pipeline", "gpipe", "--stages", "0"}), "[plan] --stages is 0\n  fix: pass 1 to 1000000\n");
  EXPECT_EQ(plan_refusal({"--pipeline", "gpipe", "--ranks", "-3"}), "[plan] --ranks is -3\n  fix: pass 1 to 1000000\n");
  EXPECT_EQ(plan_refusal({"--pipeline", "gpipe", "--ranks", "2", "--microbatches", "0"}),
            "[plan] --microbatches is 0\n  fix: pass 1 to 1000000\n");
  EXPECT_EQ(plan_refusal({"--pipeline", "gpipe", "--ranks", "1000", "--microbatches", "1000"}),
            "[plan] 2000000 actions are too many for a timetable\n"
            "  fix: pass smaller sizes: at most 200000 actions can be shown\n");
}

TEST(PlanPipeline, ATableThatWaitsForEverIsShownWithItsCycle) {
  const TemporaryFolder folder;
  const std::string file = folder.path() + "/own.csv";
  write_file(file, "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n");
  EXPECT_THAT(plan_refusal({"--pipeline", file, "--svg", folder.path() + "/own.svg"}),
              StartsWith("[simulate] the table waits for ever: rank 0 waits at B s0 m0 for rank 1 (B s1 m0), which "));
  EXPECT_FALSE(std::filesystem::exists(folder.path() + "/own.svg"));
  write_file(file, "0F0\n");
  EXPECT_THAT(plan_refusal({"--pipeline", file}), StartsWith("[PipelineTable] 0B0 is missing\n"));
}

TEST(PlanPipeline, FilesThatCannotBeReadOrWrittenAreNamed) {
  EXPECT_EQ(plan_refusal({"--pipeline", "/no/such/own.csv"}),
            "[plan] cannot read \"/no/such/own.csv\": No such file or directory\n"
            "  fix: pass a table as CSV: a line per rank, cells such as 0F0\n");
  EXPECT_EQ(plan_refusal({"--pipeline", "/no/such/own.csv", "--ranks", "2"}),
            "[plan] a table from a file has its sizes in it\n"
            "  fix: leave out --stages, --ranks and --microbatches\n");
  for (const char* option : {"--svg", "--html", "--csv"}) {
    EXPECT_EQ(plan_refusal({"--pipeline", "gpipe", "--ranks", "2", option, "/no/such/file"}),
              "[plan] cannot write \"/no/such/file\": No such file or directory\n"
              "  fix: pass a path in a folder that exists and is writable\n");
    EXPECT_EQ(plan_refusal({"--pipeline", "gpipe", "--ranks", "2", option, "/dev/full"}),
              "[plan] cannot write \"/dev/full\": No space left on device\n"
              "  fix: pass a path in a folder that exists and is writable\n");
  }
}

TEST(PlanPipeline, WrongWordsAreUsageErrors) {
  for (const std::vector<std::string>& arguments : {std::vector<std::string>{"--pipeline"},
                                                    {"--pipeline", "zbv", "--stages", "many"},
                                                    {"--pipeline", "zbv", "--tp", "2"}}) {
    EXPECT_THAT(plan_refusal(arguments),
                AllOf(StartsWith("[plan] "), HasSubstr("\n  fix: serried plan --pipeline --help")));
  }
}

TEST(PlanPipeline, ShowsAStepAsItRanBesideItsSimulation) {
  const TemporaryFolder folder;
  const std::string trace = folder.path() + "/trace.csv", page = folder.path() + "/step.html";
  std::ofstream(trace) << "rank,action,begin_us,end_us\n0,0F0,0,2\n0,0B0,8,9.5\n1,1F0,2,4\n1,1B0,5,8\n";
  const Result result = plan({"--pipeline", trace, "--html", page});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.out, AllOf(HasSubstr(": 2 ranks, 2 stages, 1 micro-batch, in us\n"),
                                HasSubstr("step 9.5 us, simulated with the times its actions took 8.5 us: 1.118 of it; "
                                          "bubble 55.3 %, simulated 50.0 %\n")));
  EXPECT_TRUE(std::filesystem::exists(page));
  std::ofstream(trace) << "rank,action,begin_us,end_us\n0,0F0,2,1\n";
  EXPECT_THAT(plan_refusal({"--pipeline", trace}), HasSubstr("\"0,0F0,2,1\" in line 2 is no action of a step"));
}

}  // namespace
}  // namespace serried::testing
