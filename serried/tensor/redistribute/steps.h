// One redistribution step on one rank.
#pragma once

#include <ATen/core/Tensor.h>

#include "serried/spmd/redistribute.h"
#include "serried/tensor/spec.h"

namespace serried::detail {

/// This rank's part after `step`, contiguous and never an alias of `local`. `owned`: nobody else sees `local`, so it
/// may be reduced in place.
at::Tensor run_step(const at::Tensor& local, bool owned, const Spec& spec, const spmd::Step& step);

}  // namespace serried::detail
