// The seven schedules: what each is known for, and that no size of them waits for ever.
#include "serried/parallel/pipeline/schedule.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <map>

#include "serried/parallel/pipeline/simulate.h"

namespace serried {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using Kind = PipelineAction::Kind;

constexpr Schedule kSchedules[] = {
    Schedule::GPipe, Schedule::OneFOneB, Schedule::Interleaved, Schedule::LoopedBFS, Schedule::InterleavedZeroBubble,
    Schedule::ZBV,   Schedule::DualPipeV};

int64_t usual_stages(Schedule schedule) {
  return stages_per_rank_of(schedule).value_or(2);
}

struct Golden {
  int64_t ranks;
  int64_t microbatches;
  Schedule schedule;
  double bubble;  // 3 digits
  int64_t most_in_flight;
};

// F = I = W = 1, B = 2: what PyTorch's tables give.
constexpr Golden kGolden[] = {
    {2, 8, Schedule::GPipe, .111, 8},
    {2, 8, Schedule::OneFOneB, .111, 2},
    {2, 8, Schedule::Interleaved, .059, 5},
    {2, 8, Schedule::LoopedBFS, .059, 16},
    {2, 8, Schedule::InterleavedZeroBubble, .020, 4},
    {2, 8, Schedule::ZBV, .020, 4},
    {2, 8, Schedule::DualPipeV, .020, 5},
    {4, 8, Schedule::GPipe, .273, 8},
    {4, 8, Schedule::OneFOneB, .273, 4},
    {4, 8, Schedule::Interleaved, .158, 11},
    {4, 8, Schedule::LoopedBFS, .158, 16},
    {4, 8, Schedule::InterleavedZeroBubble, .059, 8},
    {4, 8, Schedule::ZBV, .059, 8},
    {4, 8, Schedule::DualPipeV, .059, 9},
    {4, 16, Schedule::GPipe, .158, 16},
    {4, 16, Schedule::OneFOneB, .158, 4},
    {4, 16, Schedule::Interleaved, .086, 11},
    {4, 16, Schedule::LoopedBFS, .086, 32},
    {4, 16, Schedule::InterleavedZeroBubble, .030, 8},
    {4, 16, Schedule::ZBV, .030, 8},
    {4, 16, Schedule::DualPipeV, .030, 9},
};

TEST(PipelineSchedules, HaveTheBubblesAndPeaksTheyAreKnownFor) {
  for (const Golden& golden : kGolden) {
    const PipelineSimulation simulation =
        simulate(pipeline_table(golden.schedule, {.ranks = golden.ranks,
                                                  .stages_per_rank = usual_stages(golden.schedule),
                                                  .microbatches = golden.microbatches}));
    const std::string which =
        to_string(golden.schedule) + " p=" + std::to_string(golden.ranks) + " m=" + std::to_string(golden.microbatches);
    EXPECT_NEAR(simulation.bubble, golden.bubble, 0.0005) << which;
    EXPECT_EQ(simulation.peak_in_flight[0], golden.most_in_flight) << which;
  }
}

TEST(PipelineSchedules, OneFOneBHoldsAsManyAsThereAreRanksAfterIt) {
  const PipelineTable table = pipeline_table(Schedule::OneFOneB, {.ranks = 4, .microbatches = 8});
  EXPECT_THAT(simulate(table).peak_in_flight, ElementsAre(4, 3, 2, 1));
}

TEST(PipelineSchedules, ZBVHoldsTheSameOnAllRanks) {
  const PipelineTable table = pipeline_table(Schedule::ZBV, {.ranks = 5, .stages_per_rank = 2, .microbatches = 20});
  EXPECT_THAT(simulate(table).peak_in_flight, Each(10));
}

TEST(PipelineSchedules, SmallTablesAreThoseOfThePapers) {
  EXPECT_EQ(pipeline_table(Schedule::GPipe, {.ranks = 2, .microbatches = 3}).to_csv(),
            "0F0,0F1,0F2,0B0,0B1,0B2\n1F0,1F1,1F2,1B0,1B1,1B2\n");
  EXPECT_EQ(pipeline_table(Schedule::OneFOneB, {.ranks = 2, .microbatches = 3}).to_csv(),
            "0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n");
  EXPECT_EQ(pipeline_table(Schedule::LoopedBFS, {.ranks = 2, .stages_per_rank = 2, .microbatches = 2}).to_csv(),
            "0F0,0F1,2F0,2F1,2B0,2B1,0B0,0B1\n1F0,1F1,3F0,3F1,3B0,3B1,1B0,1B1\n");
  EXPECT_EQ(pipeline_table(Schedule::Interleaved, {.ranks = 2, .stages_per_rank = 2, .microbatches = 2}).to_csv(),
            "0F0,0F1,2F0,2F1,2B0,2B1,0B0,0B1\n1F0,1F1,3F0,3B0,3F1,3B1,1B0,1B1\n");
  EXPECT_EQ(pipeline_table(Schedule::ZBV, {.ranks = 2, .stages_per_rank = 2, .microbatches = 3}).to_csv(),
            "0F0,0F1,0F2,3F0,3I0,3W0,3F1,3I1,3W1,0I0,0W0,3F2,3I2,3W2,0I1,0W1,0I2,0W2\n"
            "1F0,2F0,1F1,2F1,2I0,2W0,1F2,1I0,1W0,2F2,2I1,2W1,1I1,2I2,1I2,1W1,2W2,1W2\n");
}

TEST(PipelineSchedules, StagesGoRoundOrDownAndUpAV) {
  const PipelineTable round =
      pipeline_table(Schedule::Interleaved, {.ranks = 4, .stages_per_rank = 3, .microbatches = 5});
  EXPECT_THAT(round.stages_of(1), ElementsAre(1, 5, 9));
  for (Schedule schedule : {Schedule::ZBV, Schedule::DualPipeV}) {
    const PipelineTable v = pipeline_table(schedule, {.ranks = 4, .stages_per_rank = 2, .microbatches = 5});
    EXPECT_THAT(v.stages_of(1), ElementsAre(1, 6));
  }
}

// Whether each stage adds its gradients in the order of micro-batches, as a loop over them would.
bool adds_in_order(const PipelineTable& table) {
  std::map<int64_t, int64_t> next;
  for (const PipelineTable::Row& row : table.rows()) {
    for (const PipelineAction& action : row) {
      const bool adds = action.kind == Kind::B || action.kind == Kind::W;
      if (adds && action.microbatch != next[action.stage]++) return false;
    }
  }
  return true;
}

// That a table is whole is the table's own check, and that it ends is simulate's. The number of tables.
int search(Schedule schedule) {
  int count = 0;
  const std::optional<int64_t> fixed = stages_per_rank_of(schedule);
  for (int64_t p = 1; p <= 8; ++p) {
    for (int64_t v = fixed.value_or(1); v <= fixed.value_or(3); ++v) {
      for (int64_t m = 1; m <= 24; ++m) {
        const std::string which = "p=" + std::to_string(p) + " v=" + std::to_string(v) + " m=" + std::to_string(m);
        const TableOptions sizes{.ranks = p, .stages_per_rank = v, .microbatches = m};
        const PipelineTable table = pipeline_table(schedule, sizes);
        EXPECT_NO_THROW(table.check(sizes)) << which;
        EXPECT_TRUE(adds_in_order(table)) << which;
        EXPECT_EQ(PipelineTable::from_csv(table.to_csv()), table) << which;
        const double makespan = simulate(table).makespan;
        EXPECT_GE(makespan, double(3 * v * m)) << which;
        // Never slower than the plainest one.
        EXPECT_LE(makespan, simulate(pipeline_table(Schedule::LoopedBFS, sizes)).makespan) << which;
        ++count;
      }
    }
  }
  return count;
}

class EverySize : public ::testing::TestWithParam<Schedule> {};

TEST_P(EverySize, IsWholeAddsInOrderAndEnds) {
  EXPECT_EQ(search(GetParam()), 8 * 24 * (stages_per_rank_of(GetParam()) ? 1 : 3));
}

INSTANTIATE_TEST_SUITE_P(PipelineSchedules, EverySize, ::testing::ValuesIn(kSchedules), [](const auto& info) {
  const std::string name = to_string(info.param);
  return name == "1F1B" ? "OneFOneB" : name;
});

TEST(PipelineSchedules, HaveNames) {
  for (Schedule schedule : kSchedules) EXPECT_EQ(parse_schedule(to_string(schedule)), schedule);
  EXPECT_EQ(parse_schedule("1f1b"), Schedule::OneFOneB);
  EXPECT_EQ(parse_schedule("OneFOneB"), Schedule::OneFOneB);
  EXPECT_EQ(parse_schedule("Interleaved1F1B"), Schedule::Interleaved);
  EXPECT_EQ(parse_schedule("looped-bfs"), Schedule::LoopedBFS);
  EXPECT_EQ(parse_schedule("interleaved_zero_bubble"), Schedule::InterleavedZeroBubble);
  EXPECT_EQ(parse_schedule("ZBVZeroBubble"), Schedule::ZBV);
}

template <class Call>
std::string schedule_refusal(Call&& call) {
  try {
    call();
  } catch (const c10::ValueError& error) {
    return error.what_without_backtrace();
  }
  return "no ValueError";
}

TEST(PipelineSchedules, AnUnknownNameIsAnsweredWithTheKnownOnes) {
  for (const char* name : {"zbx", "", "-", "GPipe "}) {
    EXPECT_EQ(schedule_refusal([&] { parse_schedule(name); }),
              "[pipeline_table] unknown schedule \"" + std::string(name) +
                  "\"; known: GPipe, 1F1B, Interleaved, LoopedBFS, InterleavedZeroBubble, ZBV, DualPipeV\n"
                  "  fix: pass one of the known names");
  }
}

TEST(PipelineSchedules, SizesThatDoNotFitAreNamed) {
  const auto of = [](Schedule schedule, TableOptions sizes) {
    return schedule_refusal([&] { pipeline_table(schedule, sizes); });
  };
  EXPECT_EQ(of(Schedule::GPipe, {.ranks = 0}), "[pipeline_table] ranks is 0\n  fix: pass 1 or more");
  EXPECT_EQ(of(Schedule::GPipe, {.ranks = 2, .stages_per_rank = -1}),
            "[pipeline_table] stages_per_rank is -1\n  fix: pass 1 or more");
  EXPECT_EQ(of(Schedule::GPipe, {.ranks = 2, .microbatches = 0}),
            "[pipeline_table] microbatches is 0\n  fix: pass 1 or more");
  EXPECT_EQ(of(Schedule::GPipe, {.ranks = 2, .stages_per_rank = 2, .microbatches = 4}),
            "[pipeline_table] GPipe has 1 stage per rank, not 2\n"
            "  fix: pass .stages_per_rank = 1, and to Pipeline one module on every rank, or take LoopedBFS");
  EXPECT_EQ(of(Schedule::OneFOneB, {.ranks = 2, .stages_per_rank = 3, .microbatches = 4}),
            "[pipeline_table] 1F1B has 1 stage per rank, not 3\n"
            "  fix: pass .stages_per_rank = 1, and to Pipeline one module on every rank, or take Interleaved");
  EXPECT_EQ(of(Schedule::ZBV, {.ranks = 4, .microbatches = 8}),
            "[pipeline_table] ZBV has 2 stages per rank, not 1\n  fix: pass .stages_per_rank = 2, and to Pipeline a "
            "vector of 2 modules on every rank");
  EXPECT_EQ(of(Schedule::DualPipeV, {.ranks = 4, .stages_per_rank = 3, .microbatches = 8}),
            "[pipeline_table] DualPipeV has 2 stages per rank, not 3\n  fix: pass .stages_per_rank = 2, and to "
            "Pipeline a vector of 2 modules on every rank");
  constexpr int64_t kHuge = int64_t(1) << 62;
  EXPECT_EQ(of(Schedule::LoopedBFS, {.ranks = 2, .stages_per_rank = kHuge, .microbatches = kHuge}),
            "[pipeline_table] 2 ranks with 4611686018427387904 stages per rank and 4611686018427387904 micro-batches "
            "have more than 4194304 forwards\n  fix: pass smaller sizes");
}

}  // namespace
}  // namespace serried
