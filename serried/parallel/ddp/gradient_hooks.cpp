// Post hooks: they run after the gradient has been added.
#include "serried/parallel/ddp/gradient_hooks.h"

#include <torch/csrc/autograd/utils/lambda_post_hook.h>

namespace serried::detail {

void GradientHooks::add(NodePtr accumulator, std::function<void()> fn) {
  using torch::autograd::variable_list;
  auto hook = [fn = std::move(fn)](const variable_list& outputs, const variable_list&) {
    fn();
    return outputs;
  };
  const uintptr_t key =
      accumulator->add_post_hook(std::make_unique<torch::autograd::utils::LambdaPostHook>(std::move(hook)));
  hooks_.push_back({std::move(accumulator), key});
}

void GradientHooks::clear() {
  for (Hook& hook : hooks_) hook.accumulator->del_post_hook(hook.key);
  hooks_.clear();
}

}  // namespace serried::detail
