// The cheapest list of steps between two placements: shortest path over the placements in between.
#pragma once

#include "serried/spmd/redistribute.h"

namespace serried::spmd::detail {

/// Steps from `from` to `to`, which differ on axes of more than one rank only. `costs` as in `redistribution`.
std::vector<Step> cheapest_steps(c10::IntArrayRef sizes, const Placements& from, const Placements& to,
                                 c10::IntArrayRef mesh_shape, const std::vector<CostModel>& costs);

/// Whether one reduction can serve axes of both kinds.
bool reduce_together(ReduceKind a, ReduceKind b);

}  // namespace serried::spmd::detail
