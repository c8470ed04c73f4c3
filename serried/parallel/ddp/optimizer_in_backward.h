// Optimizers that update each parameter as soon as its gradient is averaged.
#pragma once

#include <torch/optim/optimizer.h>

#include <functional>
#include <memory>
#include <vector>

#include "serried/parallel/ddp/ddp.h"

namespace serried {

/// Makes the optimizer of one parameter, which stands alone in the vector.
using OptimizerFactory = std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<at::Tensor>)>;

/// The optimizers at work; a copy means the same ones. One per parameter, in the order of
/// ddp.data_parallel_parameters().
class OptimizersInBackward {
 public:
  explicit OptimizersInBackward(std::vector<std::unique_ptr<torch::optim::Optimizer>> optimizers);

  size_t size() const { return optimizers_->size(); }
  torch::optim::Optimizer& operator[](size_t parameter) const { return *optimizers_->at(parameter); }

  /// The learning rate of all of them, from the next backward on.
  void set_lr(double lr) const;

 private:
  std::shared_ptr<std::vector<std::unique_ptr<torch::optim::Optimizer>>> optimizers_;
};

/// From now on backward() also steps: a bucket's parameters as soon as it is averaged, while later buckets are still on
/// their way; then their gradients are undefined. The result is that of backward() and step(), bit for bit. Works with
/// communication hooks and in join, where joined ranks step, too. Once per module, not with no_sync. A backward that
/// fails half-way may have updated some parameters already.
///     auto optimizers = optimizer_in_backward(
///         ddp, [](auto params) { return std::make_unique<torch::optim::SGD>(params, 0.1); });
///     loss(ddp(x), y).backward();
///     optimizers.set_lr(0.05);
OptimizersInBackward optimizer_in_backward(DataParallelBase& ddp, const OptimizerFactory& factory);

}  // namespace serried
