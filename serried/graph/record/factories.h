// Tensors that an op makes from numbers alone: what the host stores into one afterwards, no op shows.
#pragma once

#include "serried/graph/graph.h"

namespace serried::graph {

/// Whether the op leaves the memory of its result as it finds it: empty and its kin.
bool makes_unwritten(const c10::OperatorHandle& op);

/// Whether the op fills one new tensor by its constants, the same way each time: zeros, full, arange, ones_like.
bool makes_by_constants(const c10::OperatorHandle& op);

/// Whether `whole`, which `maker` has made by constants, is still as it was made. Runs the op once more. True without a
/// look for other devices than CPUs, and above 64 MiB: more than a mask of 4096 x 4096 floats is not made by hand.
bool is_as_made(const Node& maker, const at::Tensor& whole);

}  // namespace serried::graph
