// This rank's part of a tensor that one rank of each axis has.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>

#include "serried/mesh/mesh.h"

namespace serried::detail {

/// `placements` are resolved. Contiguous, on memory of its own; no gradients.
at::Tensor distributed_part(std::string_view where, const at::Tensor& full, const DeviceMesh& mesh,
                            const Placements& placements, std::optional<int> source);

}  // namespace serried::detail
