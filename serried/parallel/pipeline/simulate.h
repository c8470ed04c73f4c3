// What a table costs: the time of a step, the bubble in it and the memory it takes, without ranks.
#pragma once

#include <functional>
#include <vector>

#include "serried/parallel/pipeline/table.h"

namespace serried {

/// How long actions take, in any unit.
struct PipelineCosts {
  double forward = 1;
  double backward = 2;
  double input = 1;   // I
  double weight = 1;  // W
  double unshard = 0;
  double reshard = 0;
  double reduce = 0;
  double message = 0;  // from the end of an action until another rank has what it gave
  /// Where costs differ from stage to stage, as measured: used in place of all above but `message`.
  std::function<double(const PipelineAction&)> of = {};
};

struct PipelineSimulation {
  struct Span {
    double begin = 0;
    double end = 0;
  };
  double makespan = 0;
  double bubble = 0;  // the part of all ranks' time until the makespan in which they wait: 0 to 1
  /// Of each rank, the most micro-batches at once that had their F and not yet their B or W, counted in each stage.
  std::vector<int64_t> peak_in_flight;
  std::vector<std::vector<Span>> spans;  // of each action, as the table's rows
};

/// Runs `table` by the clock: each rank does its actions in order, each as soon as what it needs is there. F needs the
/// F of the stage before; B and I need their own F and the B or I of the stage after; W needs its I. Sends never block.
/// ValueError if ranks would wait for each other for ever, with the cycle, and for costs below 0.
///     simulate(pipeline_table(Schedule::ZBV, {.ranks = 4, .stages_per_rank = 2, .microbatches = 8})).bubble   // 0.059
PipelineSimulation simulate(const PipelineTable& table, const PipelineCosts& costs = {});

}  // namespace serried
