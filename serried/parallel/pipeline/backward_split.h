// A backward in two parts: gradients of a stage's input first, those of its weights later.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>

#include <vector>

namespace serried::detail {

/// The graph from an output down to an input and to parameters. The first part runs the nodes that lead to the input
/// and keeps the gradients where ways to parameters branch off; then all nodes but those of the branches are freed. The
/// second part is one ordinary backward from there, so that hooks on parameters act as ever.
class SplitBackward {
 public:
  /// The first part. `gradient` is that of `root`; where `input` is undefined, or `root` does not depend on it, nothing
  /// runs, and all is left for the second part.
  SplitBackward(torch::autograd::Edge root, at::Tensor gradient, const at::Tensor& input);

  /// Undefined where the root does not depend on the input.
  const at::Tensor& input_gradient() const { return input_gradient_; }

  /// The second part, once.
  void run_weights();

 private:
  void leave_all(torch::autograd::Edge root, at::Tensor gradient);

  at::Tensor input_gradient_;
  torch::autograd::edge_list roots_;
  std::vector<at::Tensor> gradients_;
};

/// The whole backward from `root`, to all leaves.
void run_whole_backward(const torch::autograd::Edge& root, const at::Tensor& gradient);

}  // namespace serried::detail
