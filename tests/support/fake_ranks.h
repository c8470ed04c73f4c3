// Tensors as the ranks of one mesh axis hold them, without ranks: cut, split into Partial values, put together again.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "serried/mesh/placement.h"

namespace serried::testing {

/// How a Partial comes about. Values that ranks hold have mixed signs and nothing to do with each other; a split by
/// scaling keeps signs and order, so that functions that are not linear pass for it (relu, abs, maximum).
enum class Split { independent, scaled };

/// Whether `x` can be split so: bools cannot be summed, complex numbers have no order, integers no average.
bool can_split(const at::Tensor& x, const Placement& placement);

/// What each of `ranks` ranks holds of `x`; dense copies.
std::vector<at::Tensor> scatter(const at::Tensor& x, const Placement& placement, int64_t ranks,
                                Split split = Split::independent);

/// The whole of what the ranks hold. Throws where replicas differ or parts do not fit together.
at::Tensor gather(const std::vector<at::Tensor>& parts, const Placement& placement);

/// The same values, within what another order of summation may change; nan equals nan.
bool same_values(const at::Tensor& got, const at::Tensor& want);

}  // namespace serried::testing
