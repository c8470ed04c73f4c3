// SGD that can be captured.
#pragma once

#include <torch/optim/sgd.h>

#include "serried/optim/capturable_optimizer.h"

namespace serried {

/// torch::optim::SGD as one fused op per group, with the learning rate in a tensor: capturable, and of plain
/// parameters, DTensors or both. bfloat16 and half on CPU take several ops per parameter. Sparse gradients may have
/// momentum, but no weight decay: ValueError from step().
///     serried::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
class SGD final : public CapturableOptimizer {
 public:
  /// ValueError for options that are out of range, of a group too.
  explicit SGD(const std::vector<torch::optim::OptimizerParamGroup>& groups, torch::optim::SGDOptions defaults);
  explicit SGD(std::vector<at::Tensor> params, torch::optim::SGDOptions defaults)
      : SGD({torch::optim::OptimizerParamGroup(std::move(params))}, std::move(defaults)) {}

  /// In torch::optim's format: a checkpoint of the stock optimizer loads here, and one of ours there.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 private:
  std::vector<at::Tensor> momentum_buffers(const Batch& batch);
  void update_sparse(const Batch& batch);
  void update_short(const Batch& batch);
  HostWork update(const Batch& batch) override;
  uint64_t constants(const torch::optim::OptimizerOptions& options) const override;
  uint64_t state_identity(const at::Tensor& param) const override;
};

}  // namespace serried
