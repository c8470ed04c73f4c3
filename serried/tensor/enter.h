// How a tensor comes to the layout that a consumer asks for: once for all consumers that ask alike in a row.
#pragma once

#include <ATen/core/Tensor.h>

#include "serried/tensor/above.h"

namespace serried::detail {

/// `x` in `layout` on `mesh`. A plain tensor is this rank's part, where nothing is asked a replicated one; a last dim
/// that is cut has `last_size` elements altogether, or as many on each rank where that is -1. A DTensor of another mesh
/// passes: the op says so in its own words.
at::Tensor enter(const at::Tensor& x, const DeviceMesh& mesh, const AskedLayout& layout, int64_t last_size);

}  // namespace serried::detail
