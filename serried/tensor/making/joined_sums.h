// Gradients that reach their parameters as pending sums: all of one backward are added up by one collective.
#pragma once

#include <ATen/core/Tensor.h>

#include "serried/mesh/placement.h"
#include "serried/tensor/weak_tensor.h"

namespace serried::detail {

/// Whether `grad`, on its way into `parameter.grad()`, may arrive as the pending sum it is: it is brought to
/// `placements` when this backward ends, together with others. False: somebody may want it before.
bool sum_up_later(const WeakTensor& parameter, const at::Tensor& grad, const Placements& placements);

}  // namespace serried::detail
