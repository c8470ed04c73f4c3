// What one rank holds of a recorded tensor, computed without the code under test.
#pragma once

#include <ATen/core/Tensor.h>

#include "serried/mesh/placement.h"

namespace serried::testing {

/// Where a rank stands: per axis its coordinate and the axis' size.
struct Seat {
  std::vector<int64_t> coordinate;
  std::vector<int64_t> mesh_shape;
};

/// Replicate: a copy with the same strides. Shard: the contiguous part, ceil(size / ranks) each, axes left to right.
/// Partial(sum): values whose sum over the axis is `full` exactly, of mixed signs, different on every rank.
at::Tensor local_value(const at::Tensor& full, const Placements& placements, const Seat& seat);

/// A copy with memory of its own and the same strides, expanded dims too.
at::Tensor exact_copy(const at::Tensor& tensor);

}  // namespace serried::testing
