// Factory ops inside a BornSharded scope, as the fallback meets them.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace serried::detail {

/// Runs the factory op on top of `stack` as this thread's BornSharded says. False: there is none, or the op does not
/// make a tensor from nothing; nothing was touched.
bool make_born_sharded(const c10::OperatorHandle& op, torch::jit::Stack& stack);

}  // namespace serried::detail
