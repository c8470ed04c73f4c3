// Which kind of tensor a call belongs to: the fallback's first question.
#pragma once

#include <ATen/core/stack.h>

#include "serried/tensor/dispatch/op_info.h"
#include "serried/tensor/kind.h"

namespace serried::detail {

/// The kind whose call is on top of `stack`, by all tensors among its arguments, out= ones too. Null: all are plain.
/// TypeError where kinds meet of which none takes the others.
const TensorKind* kind_of_call(const OpInfo& info, const torch::jit::Stack& stack);

}  // namespace serried::detail
