// Hooks on the nodes of autograd that add up gradients of parameters.
#pragma once

#include <torch/csrc/autograd/function.h>

#include <functional>
#include <vector>

namespace serried::detail {

/// Takes its hooks off when it goes.
class GradientHooks {
 public:
  using NodePtr = c10::intrusive_ptr<torch::autograd::Node>;

  GradientHooks() = default;
  ~GradientHooks() { clear(); }
  GradientHooks(const GradientHooks&) = delete;

  /// Calls `fn` whenever `accumulator` has added a gradient; keeps the node alive, as the parameter does not.
  void add(NodePtr accumulator, std::function<void()> fn);
  /// Hook `index` is one of `accumulator` from now on. A graph that was made before may still run the node it was on:
  /// the hook stays there, too, until that graph is gone.
  void move(size_t index, NodePtr accumulator);

  void clear();
  bool empty() const { return hooks_.empty(); }

  /// The node of hook `index`, in the order of `add`.
  torch::autograd::Node* node(size_t index) const { return hooks_[index].accumulator.get(); }

 private:
  struct Hook {
    NodePtr accumulator;
    uintptr_t key;
    std::function<void()> fn;
  };
  std::vector<Hook> hooks_;
};

}  // namespace serried::detail
