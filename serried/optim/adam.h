// Adam and AdamW that can be captured: the same state and options, another place for the weight decay.
#pragma once

#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>

#include "serried/optim/capturable_optimizer.h"
#include "serried/optim/step_counts.h"

namespace serried {
namespace detail {

template <class Options, class State>
class AdamLike final : public CapturableOptimizer {
 public:
  /// ValueError for options that are out of range, of a group too.
  explicit AdamLike(const std::vector<torch::optim::OptimizerParamGroup>& groups, Options defaults = {});
  explicit AdamLike(std::vector<at::Tensor> params, Options defaults = {})
      : AdamLike({torch::optim::OptimizerParamGroup(std::move(params))}, std::move(defaults)) {}

  /// In torch::optim's format: a checkpoint of the stock optimizer loads here, and one of ours there.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 private:
  struct Lists {
    std::vector<at::Tensor> averages, squares, maxima;
    std::vector<int64_t> made;
  };

  State& state_of(const at::Tensor& param);
  Lists state_of(const Batch& batch);
  HostWork count(const std::vector<at::Tensor>& params, const std::vector<StepCountPtr>& counts);
  HostWork update(const Batch& batch) override;
  uint64_t constants(const torch::optim::OptimizerOptions& options) const override;
  uint64_t state_identity(const at::Tensor& param) const override;

  StepCounts counts_;
};

extern template class AdamLike<torch::optim::AdamOptions, torch::optim::AdamParamState>;
extern template class AdamLike<torch::optim::AdamWOptions, torch::optim::AdamWParamState>;

}  // namespace detail

/// torch::optim::Adam as one fused op per group, with step count and learning rate in tensors: capturable, and of plain
/// parameters, DTensors or both. Complex parameters count as pairs of real numbers, as in Python. ValueError from
/// step() for sparse gradients.
///     serried::Adam optimizer(net->parameters(), torch::optim::AdamOptions(1e-3));
using Adam = detail::AdamLike<torch::optim::AdamOptions, torch::optim::AdamParamState>;

/// The same for torch::optim::AdamW.
using AdamW = detail::AdamLike<torch::optim::AdamWOptions, torch::optim::AdamWParamState>;

}  // namespace serried
