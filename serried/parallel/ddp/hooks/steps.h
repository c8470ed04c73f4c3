// The steps that hooks are made of: start a collective, go on when it is done.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

#include "serried/parallel/ddp/comm_hook.h"

namespace serried::hooks::detail {

/// A future that is complete.
HookFuture ready(const at::Tensor& tensor);

/// Sums `tensor` over the group in place.
HookFuture start_sum(const Group& group, const at::Tensor& tensor);

/// Divides `buffer` and sums it in place; the future holds it.
HookFuture average(const Group& group, const at::Tensor& buffer);

/// Runs `step` with the value of `future` when it is complete, on the thread that completes it; an error skips the step
/// and is passed on.
HookFuture after(const HookFuture& future, std::function<at::Tensor(const c10::IValue&)> step);
HookFuture after_async(const HookFuture& future, std::function<HookFuture()> step);

}  // namespace serried::hooks::detail
