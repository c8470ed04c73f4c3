// Gradients that reach their parameters as pending sums: all of one backward are added up by one collective.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "serried/mesh/placement.h"
#include "serried/tensor/weak_tensor.h"

namespace serried::detail {

/// Whether `to` is `from` with sums done, and some are.
bool only_sums(const Placements& from, const Placements& to);

/// A DTensor with a sum that is pending, and its placements once that is done: only_sums of its own.
struct PendingSum {
  at::Tensor parameter;  // whose gradient it is
  at::Tensor tensor;
  Placements placements;
};

/// The tensors become what they are once summed up, in place: by one collective for all that are pending alike.
void add_up_together(std::vector<PendingSum> sums);

/// Whether `grad`, on its way into `parameter.grad()`, may arrive as the pending sum it is: it is brought to
/// `placements` when this backward ends, together with others. False: somebody may want it before.
bool sum_up_later(const WeakTensor& parameter, const at::Tensor& grad, const Placements& placements);

}  // namespace serried::detail
