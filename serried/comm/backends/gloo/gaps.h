// What gloo cannot do, refused before it is asked, since on its own thread the same refusal would end the group; and
// what its own kernels lack or get wrong, done another way: MIN and MAX keep or drop a NaN by the order they compare
// in, sums of short floats overflow where their average does not, and integers have no average at all.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <functional>
#include <string_view>
#include <vector>

namespace serried::gloo {

/// ValueError unless the values of each tensor lie in memory one after the other: gloo takes the bytes as they are.
void check_memory(std::string_view where, const std::vector<at::Tensor>& tensors);

/// ValueError unless gloo moves these dtypes; of complex numbers it moves only what `takes_complex`.
void check_carried(std::string_view where, const std::vector<at::Tensor>& tensors, bool takes_complex = false);

/// ValueError unless gloo has `op` for these dtypes.
void check_reduction(std::string_view where, const std::vector<at::Tensor>& tensors, const c10d::ReduceOp& op);

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
