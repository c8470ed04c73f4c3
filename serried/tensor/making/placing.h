// Checks that all ways to make a DTensor share.
#pragma once

#include <c10/core/ScalarType.h>

#include <string_view>

#include "serried/mesh/mesh.h"

namespace serried::detail {

/// All Replicate where `placements` is empty, else dims counted from the front. ValueError for a Partial average of
/// integers; what checked_placements raises.
Placements resolved_placements(std::string_view where, const Placements& placements, int64_t tensor_ndim,
                               const DeviceMesh& mesh, c10::ScalarType dtype);

/// ValueError where this rank is not in `mesh`.
void check_in_mesh(std::string_view where, const DeviceMesh& mesh);

/// What the gradient of a tensor with `placements` lies by: Partial becomes Replicate.
Placements gradient_placements(const Placements& placements);

/// One group of all ranks of `mesh`, row-major.
Group whole_group(const DeviceMesh& mesh);

}  // namespace serried::detail
