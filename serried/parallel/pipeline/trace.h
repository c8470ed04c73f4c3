// One step of a pipeline as it really ran, to be put beside its simulation.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "serried/parallel/pipeline/simulate.h"

namespace serried {

/// When each action of each rank began and ended, in microseconds from the beginning of the step. An action begins when
/// what it needs is there: where a rank waits, nothing stands.
///     PipelineTrace trace = pipe.trace();
///     double lost = trace.measured().makespan / simulate(trace.table, trace.costs()).makespan;
struct PipelineTrace {
  PipelineTable table;
  std::vector<std::vector<PipelineSimulation::Span>> spans;  // of each action, as the table's rows

  /// Each action as long as it took.
  PipelineCosts costs() const;
  /// The step in the words of a simulation.
  PipelineSimulation measured() const;

  /// A line per action, which `serried plan --pipeline FILE` reads: rank,action,begin_us,end_us.
  std::string to_csv() const;
  /// ValueError for a line that is none of these, for ranks that do not stand in order, and as PipelineTable's.
  static PipelineTrace from_csv(std::string_view text);
};

/// Whether a text begins as PipelineTrace::to_csv() does.
bool is_pipeline_trace(std::string_view csv);

}  // namespace serried
