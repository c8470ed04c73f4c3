// Reductions that gloo's own kernels lack or get wrong: MIN and MAX keep or drop a NaN by the order they compare in,
// sums of short floats overflow where their average does not, and integers have no average at all.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <functional>
#include <vector>

namespace serried::gloo {

/// What to reduce instead of the tensors, with which op, and what then writes the result into them; empty where nothing
/// is to be done.
struct Reduced {
  std::vector<at::Tensor> buffers;
  c10d::ReduceOp op;
  std::function<void()> restore;
};

/// The reduction over `count` ranks. A NaN of any rank wins MIN and MAX on every rank, for a buffer of twice the size.
/// Averages of half and bfloat16 are added up in float and rounded once; those of integers are of the exact sum, cut
/// towards zero.
Reduced make_reduced(const std::vector<at::Tensor>& tensors, const c10d::ReduceOp& op, int64_t count);

}  // namespace serried::gloo
