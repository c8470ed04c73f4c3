// A step of an optimizer over some of its parameters, on stand-ins for them.
#pragma once

#include <torch/optim/optimizer.h>

#include <unordered_map>

namespace serried::detail {

using GradientMap = std::unordered_map<const void*, at::Tensor>;  // by TensorImpl of the parameter

/// Updates those parameters of `optimizer` that `gradients` has an entry for; its other entries are of no concern.
/// Neither reads nor writes .grad of a parameter: another thread may be at it.
void step_with_stand_ins(torch::optim::Optimizer& optimizer, const GradientMap& gradients);

}  // namespace serried::detail
