// A captured step as the program of a simulated rank.
#pragma once

#include <optional>
#include <vector>

#include "serried/graph/graph.h"
#include "tools/serried/simulate/job.h"

namespace serried::tools {

struct GraphJobOptions {
  /// What ops cost. None: shares of `step_us` as on a usual core.
  std::optional<simulation::Compute> compute = {};
  /// What all ops of a step took together, measured; what `compute` says of each is scaled to it.
  std::optional<double> step_us = {};
  simulation::Order order = simulation::Order::automatic;  // of sums
};

/// Ops in order, collectives on the axes whose names their groups have. ValueError for collectives that are not
/// simulated, and for groups that are no axis.
simulation::Program program_of(const graph::Graph& graph, const std::vector<simulation::Axis>& axes,
                               const GraphJobOptions& options);

/// Multiplications and additions of a node: those of products of matrices, convolutions and attention; 0 for others.
double flops_of(const graph::Graph& graph, const graph::Node& node);

}  // namespace serried::tools
