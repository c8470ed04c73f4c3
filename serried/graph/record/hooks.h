// Hooks that users put on tensors: found while a function is recorded, and called from the graph at their place in it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "serried/tape/library_hook.h"
#include "serried/tensor/spec.h"

namespace serried::graph {

struct Recording;

/// From now on hooks that users register while their thread records pass through Recorder::call_hook. Happens once per
/// process: nothing else tells of a hook on a tensor that no later op uses.
void watch_registrations();

/// The same for the hooks that `t` has already. They stay as they are for everybody else, and share their state with
/// the graphs that call them.
void share_hooks(const at::Tensor& t);

/// How often hooks were registered on `t` or removed from it. Grows with each of both.
uint64_t hook_changes(const at::Tensor& t);

/// CaptureError where the function puts a hook on a tensor of its surroundings at each call and leaves it there.
void refuse_hooks_left(const Recording& recording);

/// Shared with the tensor that the hook was registered on, so that both see the same state.
struct GraphHook {
  std::shared_ptr<const TensorHook> fn;
  SpecPtr spec = {};  // of the gradient, where that is a DTensor
};

/// By the number that `serried::call_hook(grad, id)` names them by.
using GraphHooks = std::vector<GraphHook>;

/// The op finds its hooks in `hooks`, on this thread while alive; nests.
class HooksScope {
 public:
  explicit HooksScope(const GraphHooks& hooks);
  ~HooksScope();
  HooksScope(const HooksScope&) = delete;
  HooksScope& operator=(const HooksScope&) = delete;

 private:
  const GraphHooks* previous_;
};

}  // namespace serried::graph
