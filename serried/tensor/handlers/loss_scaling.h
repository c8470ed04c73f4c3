// The check that gradient scaling makes before a step.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace serried::detail {

/// aten::_amp_foreach_non_finite_check_and_unscale_: every rank checks its parts, `found_inf` is that of all ranks.
bool check_and_unscale(const c10::OperatorHandle& op, torch::jit::Stack& stack);

}  // namespace serried::detail
