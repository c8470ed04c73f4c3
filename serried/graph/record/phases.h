// Which part of a training step each node is.
#pragma once

#include <cstdint>
#include <unordered_set>

#include "serried/graph/graph.h"

namespace serried::graph {

/// Storages, by number, that a step is about.
struct StepMemory {
  std::unordered_set<int32_t> parameters;  // of tensors of the surroundings that require gradients
  std::unordered_set<int32_t> gradients;   // of these
};

/// Gives every node its phase. Those that autograd ran come as backward; the others follow from the data:
///   optimizer: writes parameters, or is needed for that alone; with gradients read, also where a result needs it too
///   forward:   comes before backward, or backward needs it, or a result does and it reads no gradients
///   backward:  also the constant that backward starts with
///   other:     the rest: gradients set to zero, averages of weights, a norm for the log
void find_phases(Graph& graph, const StepMemory& memory);

}  // namespace serried::graph
