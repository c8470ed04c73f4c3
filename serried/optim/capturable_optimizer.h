// What the optimizers here share: steps made of ops that read every changing number from a tensor.
#pragma once

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "serried/tensor/weak_tensor.h"

namespace serried {

/// A torch::optim::Optimizer whose step a graph can repeat: stock ones put learning rate and step count into their ops
/// as constants. Schedulers, param groups, state and checkpoints are those of torch::optim.
class CapturableOptimizer : public torch::optim::Optimizer {
 public:
  // Captured graphs refer to it.
  CapturableOptimizer(CapturableOptimizer&&) = delete;

  at::Tensor step(LossClosure closure = nullptr) final;

  /// Brings the tensors that ops read up to date with options().get_lr(), which schedulers set. step() calls it, and a
  /// captured step before each replay.
  void sync_options();

 protected:
  CapturableOptimizer(std::string name, const std::vector<torch::optim::OptimizerParamGroup>& groups,
                      std::unique_ptr<torch::optim::OptimizerOptions> defaults);

  /// What one fused op may take together.
  struct Kind {
    at::Device device;
    at::ScalarType dtype;
    at::Layout grad_layout;
    std::optional<uint64_t> mesh;  // of DTensors
    bool operator==(const Kind&) const = default;
  };

  /// Parameters of one group and kind that have gradients.
  struct Batch {
    size_t group;
    Kind kind;
    std::vector<at::Tensor> params = {};
    std::vector<at::Tensor> values = {};  // what ops write: the parameters, or dense copies of those with gaps
    std::vector<at::Tensor> grads = {};
  };

  /// What the host does around the ops of a batch, at a replay too; either may be empty.
  struct HostWork {
    std::function<void()> before = {};
    std::function<void()> after = {};
  };

  /// Runs the ops of one step, and the host's work around them.
  virtual HostWork update(const Batch& batch) = 0;
  /// A number that changes with every option that update() puts into its ops as a constant.
  virtual uint64_t constants(const torch::optim::OptimizerOptions& options) const = 0;
  /// A number that changes with the tensors that update() takes as this parameter's state.
  virtual uint64_t state_identity(const at::Tensor& param) const = 0;

  const at::Tensor& learning_rate(size_t group) const { return learning_rates_[group].tensor; }
  const std::string& name() const { return name_; }

  /// A state tensor that can go with `value`: `saved`, or zeros where that is undefined. ValueError where its shape is
  /// another. Communicates nothing and is no part of a captured step.
  at::Tensor state_tensor(const at::Tensor& saved, const at::Tensor& value, const char* what) const;

 private:
  struct LearningRate {
    at::Tensor tensor;  // 0-dim double
    double written;
  };

  std::vector<Batch> batches();
  bool lists_repeats();
  void add_to(std::vector<Batch>& batches, size_t group, const at::Tensor& param) const;
  /// Holds parameters weakly: how many handles they have shows a recorder who uses them.
  void rely_on_state(const std::vector<Batch>& batches);
  void repeat_at_replays(const std::vector<HostWork>& host_work);
  std::vector<WeakTensor> without_gradients() const;
  uint64_t hash_of_options() const;
  uint64_t hash_of_state(const std::vector<WeakTensor>& stepped) const;

  std::string name_;
  std::vector<const c10::TensorImpl*> listed_;  // in the last step; addresses only
  bool lists_repeats_ = false;
  std::vector<LearningRate> learning_rates_;                // one per group
  std::shared_ptr<bool> alive_ = std::make_shared<bool>();  // graphs may outlive us
};

namespace detail {

/// Complex tensors as pairs of real numbers, others as they are: fused ops take real ones only.
std::vector<at::Tensor> as_real(const std::vector<at::Tensor>& tensors);

/// Fused ops write parameters without telling autograd, which could then use a changed one in backward unnoticed.
void bump_versions(const std::vector<at::Tensor>& tensors);

}  // namespace detail
}  // namespace serried
