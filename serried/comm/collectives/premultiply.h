// The first half of PREMUL_SUM, for backends that add.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

namespace serried::detail {

/// `x` times the factor of a PREMUL_SUM, in the dtype of `x`: integers are cut towards zero. ValueError without a
/// factor.
at::Tensor premultiplied(const at::Tensor& x, const c10d::ReduceOp& op);

}  // namespace serried::detail
