// A pipeline's step as it ran beside its simulation: where it lost time.
#pragma once

#include <string>
#include <vector>

#include "serried/parallel/pipeline/trace.h"

namespace serried::tools {

/// An action as it ran, and when it began in the simulation with the times that the actions took.
struct LateAction {
  size_t rank = 0;
  PipelineAction action = {};
  double took = 0;
  double begin = 0;
  double simulated_begin = 0;
  double lost = 0;  // by how much it was later than the action before it in its row: what was lost here

  double late() const { return begin - simulated_begin; }
};

/// Every action, rank by rank.
std::vector<LateAction> late_actions(const PipelineTrace& trace, const PipelineSimulation& simulation);

/// The `most` actions at which most was lost, as a table.
std::string lateness_list(const PipelineTrace& trace, const PipelineSimulation& simulation, size_t most = 10);

/// "step 9.5 us, simulated 8.5 us: 1.118 of it"
std::string lateness_line(const PipelineSimulation& measured, const PipelineSimulation& simulation);

}  // namespace serried::tools
