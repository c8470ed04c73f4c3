// What a hook may ask of the running backward: what it is for, and to be told when it ends.
#pragma once

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <functional>
#include <memory>
#include <utility>

namespace serried::detail {

/// Whether it computes the gradients of chosen tensors (autograd::grad, backward with inputs), not of all leaves.
inline bool is_towards_chosen_tensors() {
  const auto* chosen = torch::autograd::get_current_graph_task_exec_info();
  return chosen != nullptr && !chosen->empty();
}

/// Called inside a backward: calls `then` once, with true when it is through, with false when it has been given up
/// because of an exception. The engine runs its callbacks in the first case only, but it drops them in both.
inline void when_backward_ends(std::function<void(bool completed)> then) {
  struct Ending {
    explicit Ending(std::function<void(bool)> fn) : then(std::move(fn)) {}
    Ending(const Ending&) = delete;
    ~Ending() {
      try {
        call(false);
      } catch (...) {  // NOLINT: the exception that ended backward is the one to be seen
      }
    }
    void call(bool completed) {
      if (then) std::exchange(then, nullptr)(completed);
    }
    std::function<void(bool)> then;
  };
  auto ending = std::make_shared<Ending>(std::move(then));
  torch::autograd::Engine::get_default_engine().queue_callback([ending] { ending->call(true); });
}

}  // namespace serried::detail
