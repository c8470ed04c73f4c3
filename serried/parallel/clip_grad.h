// The norm of all gradients, wherever they are cut, and their clipping by it.
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

#include "serried/comm/groups/group.h"

namespace serried {

struct ClipOptions {
  Group pipeline = {};              // ranks that hold the other stages of the model; null: every rank holds all of it
  bool error_if_nonfinite = false;  // raise where the norm is NaN or infinite; reads it on the host
};

/// A norm that is read on the host only by who asks for the number.
class GradNorm {
 public:
  explicit GradNorm(at::Tensor value) : value_(std::move(value)) {}

  operator double() const { return value_.item<double>(); }
  /// Plain, f64, without dims.
  const at::Tensor& tensor() const { return value_; }

 private:
  at::Tensor value_;
};

/// Scales all gradients so that their norm, taken as that of one vector, is `max_norm` at most, as
/// torch::nn::utils::clip_grad_norm_ does, and returns the norm before. Parameters may be plain or DTensors, on any
/// meshes: a plain gradient counts once, a DTensor's as the whole it is, and the norm has equal bits on every rank. A
/// parameter that is listed twice counts once, and so do parameters that a Pipeline ties, with `.pipeline`. One
/// all-reduce of 8 bytes for each set of ranks that parameters are cut over; all ranks of their meshes call it with
/// their parameters in the same order. A step that drops the result can be captured.
///     double norm = clip_grad_norm_(net->parameters(), 1.0);
GradNorm clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm, double norm_type = 2.0,
                         ClipOptions options = {});
/// The same for one parameter.
GradNorm clip_grad_norm_(const at::Tensor& parameter, double max_norm, double norm_type = 2.0,
                         ClipOptions options = {});

}  // namespace serried
