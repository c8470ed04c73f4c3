// The trace of a step as it ran.
#include <gtest/gtest.h>

#include "tests/parallel/pipeline/nets.h"

namespace serried::testing {
namespace {

using staged::Layer;

TEST(PipelineTraceOfAStep, HasEveryActionInItsOrder) {
  run_ranks(2, [](const Group& group) {
    const PipelineTable table = pipeline_table(Schedule::ZBV, {.ranks = 2, .stages_per_rank = 2, .microbatches = 4});
    std::vector<Layer> layers = staged::make_layers(4);
    Pipeline pipe(
        staged::stages_of(table, group->getRank(), layers),
        {.group = group, .schedule = Schedule::ZBV, .microbatches = 4, .loss = staged::loss_fn, .trace = true});
    const auto batch = staged::batch_of(4, 2, 0);
    for (int step = 0; step < 2; ++step) pipe.step(batch.input, batch.target);
    const PipelineTrace trace = pipe.trace();
    EXPECT_EQ(trace.table, table);
    ASSERT_EQ(trace.spans.size(), 2u);
    std::map<std::string, PipelineSimulation::Span> spans;
    for (size_t rank = 0; rank < 2; ++rank) {
      ASSERT_EQ(trace.spans[rank].size(), table.rows()[rank].size());
      double end = 0;
      for (size_t i = 0; i < trace.spans[rank].size(); ++i) {
        const auto& span = trace.spans[rank][i];
        EXPECT_LE(end, span.begin);
        EXPECT_LT(span.begin, span.end);
        end = span.end;
        spans[to_cell(table.rows()[rank][i])] = span;
      }
    }
    for (int m = 0; m < 4; ++m) {
      for (int stage = 0; stage < 3; ++stage) {
        // What is sent leaves before its action ends, so only beginnings are in order for sure.
        EXPECT_LT(spans[c10::str(stage, "F", m)].begin, spans[c10::str(stage + 1, "F", m)].begin);
      }
    }
    EXPECT_EQ(PipelineTrace::from_csv(trace.to_csv()).table, table);
    EXPECT_GT(trace.measured().makespan, 0);
    EXPECT_LE(simulate(trace.table, trace.costs()).bubble, 1);
  });
}

}  // namespace
}  // namespace serried::testing
