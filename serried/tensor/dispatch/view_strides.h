// The strides of views of whole tensors: the same on every rank, which local strides are not.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/DimVector.h>

#include <vector>

namespace serried::detail {

/// Per tensor that `op`, a view op or one that changes sizes in place, gives: its strides on the whole tensor. DTensors
/// among `values` count with their global sizes and strides, or with dense ones where the argument is in `moved`: what
/// was redistributed is contiguous. Raises what the op raises on a plain tensor of those strides.
///
/// A part of one row tells nothing about the order of dims in memory, so ranks would disagree on whether a tensor is
/// contiguous, and with that on which ops LibTorch calls next.
std::vector<c10::DimVector> strides_of_views(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> values,
                                             c10::ArrayRef<int> moved);

}  // namespace serried::detail
