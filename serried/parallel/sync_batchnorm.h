// Batch normalisation by the statistics of all ranks' batches: a module, and a converter for existing ones.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>

#include "serried/comm/groups/group.h"

namespace serried {

/// Makes every torch::nn::BatchNorm1d, 2d and 3d of `net`, itself included, normalise in training by the statistics of
/// the batches of all ranks of `group`. In place: members, parameters, buffers and their names stay; a second call
/// gives them another group. Batches may differ in size or be empty; output and gradients are those of one process with
/// the whole batch, where weight and bias get this rank's part of the sum. Every rank calls its forwards and backwards
/// in the same order. Evaluation communicates nothing. Loading and `to` keep it; a clone() has to be converted again. A
/// rank with exactly one value per channel gets LibTorch's own error: for such batches use SyncBatchNorm.
///     convert_sync_batchnorm(*net, world);
void convert_sync_batchnorm(torch::nn::Module& net, const Group& group);

/// Whether `net` or a module in it has been converted or is a SyncBatchNorm.
bool has_sync_batchnorm(const torch::nn::Module& net);

/// The same as a module, for [batch, channel] and up to three more dims.
class SyncBatchNormImpl : public torch::nn::NormImplBase<0, SyncBatchNormImpl, torch::nn::BatchNormOptions> {
 public:
  SyncBatchNormImpl(const torch::nn::BatchNormOptions& options, Group group);

  at::Tensor forward(const at::Tensor& input);
  void pretty_print(std::ostream& stream) const override;

 protected:
  void _check_input_dim(const at::Tensor& input) override;

 private:
  Group group_;
};

/// Holder of a SyncBatchNormImpl.
///     serried::SyncBatchNorm norm(torch::nn::BatchNormOptions(64).momentum(0.01), world);
TORCH_MODULE(SyncBatchNorm);

}  // namespace serried
