// What LossParallel forbids: an op that gathers the classes it works along.
#pragma once

#include "serried/tensor/dispatch/cached_plan.h"

namespace serried::detail {

/// ValueError where `plan` makes whole a cut dim that holds classes: the one that argument `dim` of a computing op
/// names (softmax, sort, argmax), or that of a loss by class (nll, margins).
void check_class_gathers(const CachedPlan& plan, const spmd::Call& call, const Arguments& arguments,
                         const DeviceMesh& mesh);

}  // namespace serried::detail
