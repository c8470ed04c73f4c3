// Adam and AdamW that can be captured: the same state and options, another place for the weight decay.
#pragma once

#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "serried/optim/capturable_optimizer.h"

namespace serried {
namespace detail {

/// A number of steps made, on the host and in a 0-dim float tensor that ops advance.
class StepCount {
 public:
  StepCount(int64_t value, at::Device device);

  const at::Tensor& tensor() const { return tensor_; }
  int64_t value() const { return value_; }

  /// Before and after the ops that advance the tensor by one. If they failed in between, the next `begin` writes it
  /// again.
  void begin();
  void end();

 private:
  friend class StepCounts;

  at::Tensor tensor_;
  int64_t value_;
  bool is_written_ = true;
  int num_users_ = 0;
  int num_stepping_ = 0;
};

using StepCountPtr = std::shared_ptr<StepCount>;

/// The counts of an optimizer's parameters. Those that always step together share one: one op counts for all.
class StepCounts {
 public:
  /// The counts of `params` that step now, of which each has made `made` steps before.
  std::vector<StepCountPtr> of(const std::vector<at::Tensor>& params, const std::vector<int64_t>& made);

  /// The tensor of a parameter that has made `made` steps; undefined where `of` would give it another.
  at::Tensor tensor_of(const at::Tensor& param, int64_t made) const;

 private:
  std::unordered_map<const void*, StepCountPtr> by_param_;
};

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
