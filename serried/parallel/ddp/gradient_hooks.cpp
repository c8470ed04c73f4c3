// Post hooks: they run after the gradient has been added.
#include "serried/parallel/ddp/gradient_hooks.h"

#include "serried/tape/library_hook.h"

namespace serried::detail {

void GradientHooks::add(NodePtr accumulator, std::function<void()> fn) {
  const uintptr_t key = accumulator->add_post_hook(library_post_hook(fn));
  hooks_.push_back({std::move(accumulator), key, std::move(fn)});
}

void GradientHooks::move(size_t index, NodePtr accumulator) {
  Hook& hook = hooks_[index];
  if (accumulator == hook.accumulator) return;
  hook.key = accumulator->add_post_hook(library_post_hook(hook.fn));
  hook.accumulator = std::move(accumulator);
}

void GradientHooks::clear() {
  for (Hook& hook : hooks_) hook.accumulator->del_post_hook(hook.key);
  hooks_.clear();
}

}  // namespace serried::detail
