// Parts of a tensor along one dim, laid one after the other in memory, and the way back.
#pragma once

#include <ATen/core/Tensor.h>

namespace serried::detail {

/// The `parts` equal parts of the contiguous `x` along `dim`, in scratch memory: use it before the next call.
at::Tensor packed(const at::Tensor& x, int64_t dim, int64_t parts);

/// The way back, into the contiguous `x`.
void unpack(const at::Tensor& x, int64_t dim, int64_t parts, const at::Tensor& buffer);

}  // namespace serried::detail
