// Averages by way of a sum, for backends that can only add: in a dtype in which that sum fits.
#pragma once

#include <ATen/core/Tensor.h>

namespace serried::detail {

/// What `count` ranks add up to get the average of their `x`: `x` itself where its dtype holds the sum, else a tensor
/// of a wider one. Half and bfloat16 are thus rounded once, integers are exact.
at::Tensor average_addends(const at::Tensor& x, int64_t count);

/// Writes the average into `x`, given the sum over the ranks of their addends. Integers are cut towards zero.
void write_average(const at::Tensor& x, const at::Tensor& sum, int64_t count);

}  // namespace serried::detail
