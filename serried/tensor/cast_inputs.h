// Inputs in another dtype than the parameter they meet computes in: cast above autograd, so that gradients come back.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace serried::detail {

/// What `x` is to be cast to before it meets `parameter`; none: it may stay. Parameters among themselves do.
std::optional<at::ScalarType> cast_beside(const at::Tensor& x, const at::Tensor& parameter);

}  // namespace serried::detail
