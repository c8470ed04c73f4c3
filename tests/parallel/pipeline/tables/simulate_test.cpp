// Simulated steps: times by hand, measured costs, memory, and tables that wait for ever.
#include "serried/parallel/pipeline/simulate.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <c10/util/Exception.h>

#include <limits>

#include "serried/parallel/pipeline/schedule.h"

namespace serried {
namespace {

using ::testing::ElementsAre;
using Kind = PipelineAction::Kind;

std::string simulate_refusal(const std::string& csv, const PipelineCosts& costs = {}) {
  const PipelineTable table = PipelineTable::from_csv(csv);
  try {
    simulate(table, costs);
  } catch (const c10::ValueError& error) {
    return error.what_without_backtrace();
  }
  return "no ValueError";
}

TEST(Simulate, TimesAreThoseByHand) {
  const PipelineSimulation result = simulate(PipelineTable::from_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"));
  EXPECT_EQ(result.makespan, 9);
  EXPECT_DOUBLE_EQ(result.bubble, 1 - 12.0 / 18);
  EXPECT_THAT(result.peak_in_flight, ElementsAre(2, 1));
  std::vector<std::pair<double, double>> times;
  for (const auto& row : result.spans) {
    for (const PipelineSimulation::Span& span : row) times.emplace_back(span.begin, span.end);
  }
  EXPECT_THAT(times, ElementsAre(std::pair(0.0, 1.0), std::pair(1.0, 2.0), std::pair(4.0, 6.0), std::pair(7.0, 9.0),
                                 std::pair(1.0, 2.0), std::pair(2.0, 4.0), std::pair(4.0, 5.0), std::pair(5.0, 7.0)));
}

TEST(Simulate, OneRankHasNoBubble) {
  for (const char* csv : {"0F0,0B0\n", "0F0,1F0,1I0,0I0,0W0,1W0\n"}) {
    EXPECT_EQ(simulate(PipelineTable::from_csv(csv)).bubble, 0) << csv;
  }
}

TEST(Simulate, AMicrobatchIsInFlightUntilItsWeightsHaveTheirGradients) {
  EXPECT_THAT(simulate(PipelineTable::from_csv("0F0,0I0,0F1,0I1,0W0,0W1\n")).peak_in_flight, ElementsAre(2));
  EXPECT_THAT(simulate(PipelineTable::from_csv("0F0,0I0,0W0,0F1,0I1,0W1\n")).peak_in_flight, ElementsAre(1));
}

TEST(Simulate, MessagesTakeTimeBetweenRanksOnly) {
  const PipelineTable apart = PipelineTable::from_csv("0F0,0B0\n1F0,1B0\n");
  EXPECT_EQ(simulate(apart).makespan, 6);
  EXPECT_EQ(simulate(apart, {.message = 0.5}).makespan, 7);
  const PipelineTable together = PipelineTable::from_csv("0F0,1F0,1B0,0B0\n");
  EXPECT_EQ(simulate(together, {.message = 0.5}).makespan, 6);
}

TEST(Simulate, CostsMayDifferFromStageToStage) {
  const PipelineTable table = PipelineTable::from_csv("0UNSHARD,0F0,0I0,0W0,0RESHARD,0REDUCE_GRAD\n1F0,1B0\n");
  EXPECT_EQ(simulate(table).makespan, 6);
  const PipelineCosts by_kind{
      .forward = 2, .backward = 3, .input = 4, .weight = 5, .unshard = 6, .reshard = 7, .reduce = 8};
  EXPECT_EQ(simulate(table, by_kind).makespan, 6 + 2 + 2 + 3 + 4 + 5 + 7 + 8);
  const PipelineCosts measured{.of = [](const PipelineAction& action) { return action.stage == 1 ? 10.0 : 1.0; }};
  EXPECT_EQ(simulate(table, measured).makespan, 1 + 1 + 10 + 10 + 1 + 1 + 1 + 1);
}

TEST(Simulate, CostsThatAreNoTimesAreRefused) {
  const std::string fix = "\n  fix: costs are times: 0 or more, and finite";
  EXPECT_EQ(simulate_refusal("0F0,0B0\n", {.backward = -1}), "[simulate] the cost of B s0 m0 is -1.000000" + fix);
  EXPECT_EQ(simulate_refusal("0F0,0B0\n", {.message = -2}), "[simulate] the cost of a message is -2.000000" + fix);
  EXPECT_EQ(simulate_refusal("0F0,0B0\n", {.forward = std::numeric_limits<double>::infinity()}),
            "[simulate] the cost of F s0 m0 is inf" + fix);
}

TEST(Simulate, AStepThatCostsNothingHasNoBubble) {
  EXPECT_EQ(simulate(PipelineTable::from_csv("0F0,0B0\n"), {.forward = 0, .backward = 0}).bubble, 0);
}

TEST(Simulate, TheCycleIsNamedWhereTwoRanksWaitForEachOther) {
  const std::string fix = "\n  fix: move what is waited for to an earlier place in its row";
  EXPECT_EQ(simulate_refusal("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n"),
            "[simulate] the table waits for ever: rank 0 waits at B s0 m0 for rank 1 (B s1 m0), which waits at F s1 m1 "
            "for rank 0 (F s0 m1)" +
                fix);
  EXPECT_EQ(simulate_refusal("0F0,0B0,0F1,0B1\n1F0,1F1,1I0,1W0,1B1\n"),
            "[simulate] the table waits for ever: rank 0 waits at B s0 m0 for rank 1 (I s1 m0), which waits at F s1 m1 "
            "for rank 0 (F s0 m1)" +
                fix);
}

TEST(Simulate, RanksOutsideOfTheCycleAreNotNamed) {
  // Ranks 2 and 3 wait for each other, ranks 0 and 1 for them.
  EXPECT_EQ(simulate_refusal("0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n2F0,2B0,2F1,2B1\n3F0,3F1,3B0,3B1\n"),
            "[simulate] the table waits for ever: rank 2 waits at B s2 m0 for rank 3 (B s3 m0), which waits at F s3 m1 "
            "for rank 2 (F s2 m1)\n  fix: move what is waited for to an earlier place in its row");
}

TEST(Simulate, ACycleMayGoOverManyRanks) {
  EXPECT_EQ(simulate_refusal("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n2F0,2F1,2B0,2B1\n"),
            "[simulate] the table waits for ever: rank 0 waits at B s0 m0 for rank 1 (B s1 m0), which waits at F s1 m1 "
            "for rank 0 (F s0 m1)\n  fix: move what is waited for to an earlier place in its row");
  EXPECT_EQ(simulate_refusal("0F0,3B0,0B0,3F0\n1F0,1B0\n2F0,2B0\n"),
            "[simulate] the table waits for ever: rank 0 waits at B s3 m0 for its own F s3 m0, which comes later\n"
            "  fix: move what is waited for to an earlier place in its row");
  EXPECT_EQ(simulate_refusal("3F0,0F0,0B0,3B0\n1F0,1B0\n2F0,2B0\n"),
            "[simulate] the table waits for ever: rank 0 waits at F s3 m0 for rank 2 (F s2 m0), which waits at F s2 m0 "
            "for rank 1 (F s1 m0), which waits at F s1 m0 for rank 0 (F s0 m0)\n"
            "  fix: move what is waited for to an earlier place in its row");
}

TEST(Simulate, ARankMayWaitForItself) {
  const std::string fix = "\n  fix: move what is waited for to an earlier place in its row";
  EXPECT_EQ(
      simulate_refusal("0B0,0F0\n"),
      "[simulate] the table waits for ever: rank 0 waits at B s0 m0 for its own F s0 m0, which comes later" + fix);
  EXPECT_EQ(
      simulate_refusal("0F0,0W0,0I0\n"),
      "[simulate] the table waits for ever: rank 0 waits at W s0 m0 for its own I s0 m0, which comes later" + fix);
}

TEST(Simulate, LargeTablesTakeNoTime) {
  const PipelineTable table =
      pipeline_table(Schedule::Interleaved, {.ranks = 64, .stages_per_rank = 4, .microbatches = 256});
  EXPECT_NEAR(simulate(table).bubble, 63.0 / (63 + 4 * 256), 1e-12);
}

}  // namespace
}  // namespace serried
