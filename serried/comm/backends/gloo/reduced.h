// Reductions that gloo's own kernels get wrong: MIN and MAX keep or drop a NaN by the order they compare in, sums of
// short floats overflow where their average does not.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <functional>
#include <vector>

namespace serried::gloo {

/// What to reduce instead of the tensors, and what then writes the result into them; empty where nothing is to be done.
struct Reduced {
  std::vector<at::Tensor> buffers;
  std::function<void()> restore;
};

/// Costs a buffer of twice the size, for MIN and MAX of floating point and for AVG of half and bfloat16 only. A NaN of
/// any rank then wins MIN and MAX on every rank; averages are added up in float and rounded once.
Reduced make_reduced(const std::vector<at::Tensor>& tensors, const c10d::ReduceOp& op);

}  // namespace serried::gloo
