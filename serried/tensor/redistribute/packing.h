// Parts of a tensor along one dim, laid one after the other in memory, and the way back.
#pragma once

#include <ATen/core/Tensor.h>

namespace serried::detail {

/// A tensor to fill and forget before the next call on this thread. Of middle sizes it is the same memory every time:
/// allocators give such blocks back to the system, and the page faults cost more than the copy.
at::Tensor scratch(c10::IntArrayRef sizes, const at::TensorOptions& options);

/// The same for what outlives the next call.
at::Tensor own_memory(c10::IntArrayRef sizes, const at::TensorOptions& options);

using Memory = decltype(&scratch);

/// The `parts` equal parts of the contiguous `x` along `dim`.
at::Tensor packed(const at::Tensor& x, int64_t dim, int64_t parts, Memory memory);

/// The way back, into the contiguous `x`.
void unpack(const at::Tensor& x, int64_t dim, int64_t parts, const at::Tensor& buffer);

}  // namespace serried::detail
