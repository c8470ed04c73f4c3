// Hooks of users as a graph owns them, and the op that calls one of them at its place in the graph.
#pragma once

#include <memory>
#include <vector>

#include "serried/tape/library_hook.h"
#include "serried/tensor/spec.h"

namespace serried::graph {

/// Shared with the tensor that the hook was registered on, so that both see the same state.
struct GraphHook {
  std::shared_ptr<const TensorHook> fn;
  SpecPtr spec = {};  // of the gradient, where that is a DTensor
};

/// By the number that `serried::call_hook(grad, id)` names them by.
using GraphHooks = std::vector<GraphHook>;

/// The op finds its hooks in `hooks`, on this thread while alive; nests.
class HooksGuard {
 public:
  explicit HooksGuard(const GraphHooks& hooks);
  ~HooksGuard();
  HooksGuard(const HooksGuard&) = delete;
  HooksGuard& operator=(const HooksGuard&) = delete;

 private:
  const GraphHooks* previous_;
};

}  // namespace serried::graph
