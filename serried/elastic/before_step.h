// What a step changes besides the optimizer's work, as it was when the step began.
#pragma once

#include <ATen/core/Generator.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "serried/checkpoint/source.h"
#include "serried/elastic/kept_state.h"

namespace serried::detail {

/// Buffers of kept modules, options of kept optimizers, schedulers, samplers and variables, and the generators of this
/// rank. What is kept has to outlive it.
class BeforeStep {
 public:
  explicit BeforeStep(at::Device device) : device_(device) {}

  void keep(const checkpoint::Entry& entry);
  void keep(torch::optim::Optimizer& optimizer) { optimizers_.push_back(&optimizer); }

  void take();
  /// As it was at the last take(). Gradients of kept modules and optimizers are dropped.
  void put_back();

 private:
  std::vector<at::Tensor> buffers() const;
  void drop_gradients();

  const at::Device device_;
  std::vector<const torch::nn::Module*> modules_;
  std::vector<torch::optim::Optimizer*> optimizers_;
  checkpoint::Contents others_;

  std::vector<at::Tensor> buffer_copies_;
  std::vector<std::vector<std::unique_ptr<torch::optim::OptimizerOptions>>> options_;
  KeptState other_state_;  // tensors are copies
  std::vector<std::pair<at::Generator, at::Tensor>> generators_;
};

}  // namespace serried::detail
