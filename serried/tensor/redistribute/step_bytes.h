// Bytes that redistribution steps send, by the same model that plans go by.
#pragma once

#include <c10/core/ScalarType.h>

#include <vector>

#include "serried/spmd/redistribute.h"

namespace serried::detail {

/// What one rank sends for `step` of a tensor of `sizes`.
int64_t step_bytes(const spmd::Step& step, c10::IntArrayRef sizes, c10::ScalarType dtype, c10::IntArrayRef mesh_shape);

/// Of all of them.
int64_t step_bytes(const std::vector<spmd::Step>& steps, c10::IntArrayRef sizes, c10::ScalarType dtype,
                   c10::IntArrayRef mesh_shape);

}  // namespace serried::detail
