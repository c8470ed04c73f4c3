// Steps as they ran: text both ways, sums, and the simulation with measured costs.
#include "serried/parallel/pipeline/trace.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <c10/util/Exception.h>

#include "serried/parallel/pipeline/schedule.h"

namespace serried {
namespace {

using ::testing::ElementsAre;

// Rank 1 began its first backward 1 us after what it needed was there.
const char* const kStep =
    "rank,action,begin_us,end_us\n"
    "0,0F0,0.000,2.000\n"
    "0,0B0,8.000,9.500\n"
    "1,1F0,2.000,4.000\n"
    "1,1B0,5.000,8.000\n";

std::string trace_refusal(const std::string& csv) {
  try {
    PipelineTrace::from_csv(csv);
  } catch (const c10::ValueError& error) {
    return error.what_without_backtrace();
  }
  return "no ValueError";
}

TEST(PipelineTrace, ComesBackFromCsv) {
  EXPECT_TRUE(is_pipeline_trace(kStep));
  EXPECT_FALSE(is_pipeline_trace("0F0,0B0\n"));
  const PipelineTrace trace = PipelineTrace::from_csv(kStep);
  EXPECT_EQ(trace.table, PipelineTable::from_csv("0F0,0B0\n1F0,1B0\n"));
  EXPECT_EQ(trace.spans[0][1].begin, 8);
  EXPECT_EQ(trace.spans[0][1].end, 9.5);
  EXPECT_EQ(trace.to_csv(), kStep);
}

TEST(PipelineTrace, SaysHowLongTheStepTookAndHowLongItHadToTake) {
  const PipelineTrace trace = PipelineTrace::from_csv(kStep);
  const PipelineSimulation measured = trace.measured();
  EXPECT_EQ(measured.makespan, 9.5);
  EXPECT_DOUBLE_EQ(measured.bubble, 1 - 8.5 / 19);
  EXPECT_THAT(measured.peak_in_flight, ElementsAre(1, 1));
  EXPECT_EQ(simulate(trace.table, trace.costs()).makespan, 8.5);
}

TEST(PipelineTrace, LinesThatAreNoActionsAreNamed) {
  EXPECT_EQ(trace_refusal("rank,action,begin_us,end_us\n0,0F0,1,2,\n"),
            "[PipelineTrace] \"0,0F0,1,2,\" in line 2 is no action of a step\n"
            "  fix: write rank,action,begin_us,end_us with ranks in order: 0,0F3,120.5,180");
  for (const char* line :
       {"0,0F0,2,1", "0,0X0,0,1", "-1,0F0,0,1", "0,0F0,0,nan", "0,0F0,0,inf", "2,0F0,0,1", "0,0F0,0", "", " "}) {
    EXPECT_THAT(trace_refusal(std::string(line) + "\n"), ::testing::HasSubstr("in line 1 is no action of a step"))
        << line;
  }
  EXPECT_THAT(trace_refusal("0,0F0,0,1\n1,1F0,0,1\n0,0B0,0,1\n"), ::testing::HasSubstr("in line 3"));
}

TEST(PipelineTrace, HasEveryActionOfItsTable) {
  EXPECT_THAT(trace_refusal("0,0F0,0,1\n"), ::testing::HasSubstr("[PipelineTable]"));
  EXPECT_THAT(trace_refusal(""), ::testing::HasSubstr("[PipelineTable]"));
}

}  // namespace
}  // namespace serried
