// Reductions that not every backend has, by way of a sum, which every one has.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

namespace serried::detail {

/// What `count` ranks add up to get the average of their `x`: `x` itself where its dtype holds the sum, else a tensor
/// of a wider one. Half and bfloat16 are thus rounded once, integers are exact.
at::Tensor average_addends(const at::Tensor& x, int64_t count);

/// Writes the average into `x`, given the sum over the ranks of their addends. Integers are cut towards zero.
void write_average(const at::Tensor& x, const at::Tensor& sum, int64_t count);

/// `x` times the factor of a PREMUL_SUM, in the dtype of `x`: integers are cut towards zero. ValueError without a
/// factor.
at::Tensor premultiplied(const at::Tensor& x, const c10d::ReduceOp& op);

}  // namespace serried::detail
