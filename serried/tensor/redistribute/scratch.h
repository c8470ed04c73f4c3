// Memory that redistributions pack into, kept per thread.
#pragma once

#include <ATen/core/Tensor.h>

namespace serried::detail {

/// A tensor to fill and forget before the next call on this thread. Of middle sizes it is the same memory every time:
/// allocators give such blocks back to the system, and the page faults cost more than the copy.
at::Tensor scratch(c10::IntArrayRef sizes, const at::TensorOptions& options);

}  // namespace serried::detail
