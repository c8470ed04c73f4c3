// What `serried plan --pipeline` prints and draws of a table.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "serried/parallel/pipeline/schedule.h"
#include "tools/serried/pipeline_lateness.h"
#include "tools/serried/pipeline_page.h"
#include "tools/serried/pipeline_svg.h"
#include "tools/serried/pipeline_text.h"

namespace serried::tools {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

PipelineTable small_table() {
  return PipelineTable::from_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1I1,1W1\n");
}

int occurrences(const std::string& text, const std::string& part) {
  int count = 0;
  for (size_t at = text.find(part); at != text.npos; at = text.find(part, at + part.size())) ++count;
  return count;
}

TEST(PipelinePicture, TheTimetableHasAColumnPerUnitOfTime) {
  EXPECT_EQ(timetable(small_table(), simulate(small_table())),
            "time      0    1    2    3    4    5    6    7\n"
            "rank 0  0F0  0F1    .    .  0B0    -  0B1    -\n"
            "rank 1    .  1F0  1B0    -  1F1  1I1  1W1    .\n");
}

TEST(PipelinePicture, TheTimetableIsCutIntoBlocks) {
  EXPECT_EQ(timetable(small_table(), simulate(small_table()), 30),
            "time      0    1    2    3\n"
            "rank 0  0F0  0F1    .    .\n"
            "rank 1    .  1F0  1B0    -\n"
            "\n"
            "time      4    5    6    7\n"
            "rank 0  0B0    -  0B1    -\n"
            "rank 1  1F1  1I1  1W1    .\n");
  EXPECT_EQ(occurrences(timetable(small_table(), simulate(small_table()), 1), "time"), 8);
  EXPECT_EQ(timetable(small_table(), simulate(small_table()), 30, 1),
            "time      0    1    2    3\n"
            "rank 0  0F0  0F1    .    .\n"
            "rank 1    .  1F0  1B0    -\n"
            "... and up to time 7: --full\n");
}

TEST(PipelinePicture, TimesThatFitIntoNoColumnsLeaveTheTable) {
  EXPECT_EQ(timetable(small_table(), simulate(small_table(), {.forward = 0.5})), small_table().to_text());
}

TEST(PipelinePicture, RanksAreListedWithWhatTheyDo) {
  EXPECT_EQ(rank_list(small_table(), simulate(small_table())),
            "rank  stages  works  waits  most in flight\n"
            "   0       0      6      2               2\n"
            "   1       1      6      2               1\n");
}

TEST(PipelinePicture, EveryActionAndEveryWaitIsDrawnAndSaysWhatItIs) {
  const std::string svg = pipeline_svg(small_table(), simulate(small_table()), "a <title> & more");
  EXPECT_EQ(occurrences(svg, "<g class=\"action F"), 4);
  EXPECT_EQ(occurrences(svg, "<g class=\"action B"), 3);
  EXPECT_EQ(occurrences(svg, "<g class=\"action I"), 1);
  EXPECT_EQ(occurrences(svg, "<g class=\"action W"), 1);
  EXPECT_EQ(occurrences(svg, "<g class=\"wait\"><title>"), 3);
  EXPECT_THAT(svg, HasSubstr("<title>B s0 m1: rank 0, 6 to 8</title>"));
  EXPECT_THAT(svg, HasSubstr("<title>rank 0 waits, 2 to 4</title>"));
  EXPECT_THAT(svg, HasSubstr(">rank 1</text>"));
  EXPECT_THAT(svg, HasSubstr(">2 in flight</text>"));
  EXPECT_THAT(svg, HasSubstr("makespan 8, bubble 25.0 %"));
  EXPECT_THAT(svg, HasSubstr("a &lt;title&gt; &amp; more"));
  EXPECT_THAT(svg, HasSubstr("@media (prefers-color-scheme:dark)"));
  EXPECT_THAT(svg, Not(HasSubstr(" second\"")));
}

TEST(PipelinePicture, TheSecondStageOfARankHasAnotherShade) {
  const PipelineTable table = pipeline_table(Schedule::ZBV, {.ranks = 2, .stages_per_rank = 2, .microbatches = 3});
  const std::string svg = pipeline_svg(table, simulate(table), "ZBV");
  EXPECT_EQ(occurrences(svg, " second\""), 2 * 3 * 3);
  EXPECT_THAT(svg, HasSubstr("other shade: every second stage of a rank"));
  EXPECT_THAT(svg, Not(HasSubstr("B backward")));
}

TEST(PipelinePicture, ActionsThatTakeNoTimeCanStillBePointedAt) {
  const PipelineTable table = PipelineTable::from_csv("0UNSHARD,0F0,0B0\n");
  EXPECT_THAT(pipeline_svg(table, simulate(table), "t"), HasSubstr("<title>unshard s0: rank 0, 0 to 0</title>"));
  EXPECT_NE(pipeline_svg(table, simulate(table, {.forward = 0, .backward = 0}), "t"), "");
}

TEST(PipelinePicture, AnyUnitOfTimeFitsOnAScreen) {
  for (double unit : {1e-6, 1.0, 1e6}) {
    const PipelineCosts costs{.forward = unit, .backward = 2 * unit, .input = unit, .weight = unit};
    const std::string svg = pipeline_svg(small_table(), simulate(small_table(), costs), "t");
    EXPECT_THAT(svg,
                HasSubstr("<svg xmlns=\"http://www.w3.org/2000/svg\" class=\"pipeline\" role=\"img\" width=\"640\""));
    EXPECT_LE(occurrences(svg, "<line class=\"line\""), 12) << unit;
    EXPECT_GE(occurrences(svg, "<line class=\"line\""), 2) << unit;
  }
}

TEST(PipelinePicture, ThePageNeedsNothingElse) {
  const std::string page = pipeline_page(small_table(), simulate(small_table()), "t");
  EXPECT_THAT(page, HasSubstr("<svg xmlns="));
  EXPECT_THAT(page, HasSubstr("<tr><td>0</td><td>0</td><td>6</td><td>2</td><td>2</td></tr>"));
  EXPECT_THAT(page, HasSubstr("0F0,0F1,0B0,0B1\n"));
  EXPECT_THAT(page, Not(HasSubstr("src=")));
  EXPECT_THAT(page, Not(HasSubstr("href=")));
}

// Rank 1 began its backward 1 us after it could.
PipelineTrace late_step() {
  return {PipelineTable::from_csv("0F0,0B0\n1F0,1B0\n"), {{{0, 2}, {8, 9.5}}, {{2, 4}, {5, 8}}}};
}

TEST(PipelinePicture, AStepAsItRanIsPutBesideItsSimulation) {
  const PipelineTrace trace = late_step();
  const PipelineSimulation simulated = simulate(trace.table, trace.costs());
  EXPECT_EQ(lateness_line(trace.measured(), simulated),
            "step 9.5 us, simulated with the times its actions took 8.5 us: 1.118 of it");
  EXPECT_EQ(lateness_list(trace, simulated, 3),
            "rank  action  took us  began  simulated  late  lost here\n"
            "   0     0B0      1.5    8.0        7.0   1.0        1.0\n"
            "   1     1B0      3.0    5.0        4.0   1.0        1.0\n"
            "   0     0F0      2.0    0.0        0.0   0.0        0.0\n");
  const std::string html = pipeline_page(trace, "step");
  EXPECT_EQ(occurrences(html, "<svg"), 2);
  EXPECT_THAT(html, HasSubstr("step, in us, as it ran"));
  EXPECT_THAT(html, HasSubstr("step, in us, simulated"));
  EXPECT_THAT(html, HasSubstr("<td>1B0</td><td>3</td><td>5</td><td>4</td><td>1</td><td>1</td>"));
}

}  // namespace
}  // namespace serried::tools
