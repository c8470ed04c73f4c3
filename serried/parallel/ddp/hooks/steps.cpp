// Steps of hooks on c10's futures.
#include "serried/parallel/ddp/hooks/steps.h"

#include "serried/comm/collectives/ops.h"

#include <ATen/core/grad_mode.h>
#include <ATen/core/jit_type.h>

#include <utility>
#include <vector>

namespace serried::hooks::detail {

HookFuture ready(const at::Tensor& tensor) {
  auto future = c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get());
  future->markCompleted(tensor);
  return future;
}

HookFuture start_sum(const Group& group, const at::Tensor& tensor) {
  return serried::detail::ops::start_all_reduce_(tensor, group, serried::detail::share(c10d::ReduceOp::SUM))
      ->getFuture();
}

HookFuture average(const Group& group, const at::Tensor& buffer) {
  buffer.div_(group->getSize());
  return after(start_sum(group, buffer), [buffer](const c10::IValue&) { return buffer; });
}

HookFuture after(const HookFuture& future, std::function<at::Tensor(const c10::IValue&)> step) {
  return future->then(
      [step = std::move(step)](c10::ivalue::Future& done) -> c10::IValue {
        const at::NoGradGuard no_grad;
        return step(done.value());
      },
      c10::TensorType::get());
}

HookFuture after_async(const HookFuture& future, std::function<HookFuture()> step) {
  return future->thenAsync(
      [step = std::move(step)](c10::ivalue::Future& done) {
        done.value();  // raises what went wrong
        const at::NoGradGuard no_grad;
        return step();
      },
      c10::TensorType::get());
}

}  // namespace serried::hooks::detail
