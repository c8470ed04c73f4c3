// MIN and MAX on which every rank sees a NaN of any rank; gloo's own keep or drop it by the order they compare in.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <functional>
#include <vector>

namespace serried::gloo {

/// What to reduce instead of the tensors, and what then writes the result into them; empty where nothing is to be done.
struct NanWins {
  std::vector<at::Tensor> buffers;
  std::function<void()> restore;
};

/// Costs a buffer of twice the size, for MIN and MAX of floating point only.
NanWins make_nan_win(const std::vector<at::Tensor>& tensors, const c10d::ReduceOp& op);

}  // namespace serried::gloo
