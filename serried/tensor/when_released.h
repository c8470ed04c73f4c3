// Says when nobody owns a DTensor any more, though somebody may still watch it.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

namespace serried::detail {

/// Calls `then`, which must not throw, when the last handle on `t`, a DTensor, is gone, and on what autograd copied of
/// it. Who watches a DTensor keeps what stands behind it alive: to let go of that here ends what would be a circle.
void when_released(const at::Tensor& t, std::function<void()> then);

}  // namespace serried::detail
