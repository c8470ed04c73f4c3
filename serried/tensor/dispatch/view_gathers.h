// Warns of views that split a cut dim where the ranks do not divide it: heads that are gathered without a word.
#pragma once

#include "serried/mesh/mesh.h"
#include "serried/tensor/dispatch/cached_plan.h"

namespace serried::detail {

/// Says once per process, on the mesh's first rank, that the planned view communicates, why, and how to avoid it. For
/// any other op, and where an ExplicitRedistribution looks at hidden communication, it says nothing.
void warn_of_split(const OpInfo& info, const spmd::Call& call, const CachedPlan& plan, const Placements& from,
                   const DeviceMesh& mesh);

}  // namespace serried::detail
