// Parameters averaged every few steps instead of gradients at every step, and the optimizer that does both its step
// and that.
#pragma once

#include <torch/optim/optimizer.h>
#include <torch/serialize/input-archive.h>
#include <torch/serialize/output-archive.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "serried/comm/groups/group.h"

namespace serried {

/// Replaces each parameter that has a gradient by its mean over the group, in place. The same parameters on every rank;
/// does nothing where the group is null.
void average_parameters(const std::vector<at::Tensor>& parameters, const Group& group);

namespace detail {

/// Steps of one averager; a copy counts on its own. Captured graphs refer to it.
class AveragerSteps {
 public:
  AveragerSteps() = default;
  AveragerSteps(const AveragerSteps& other) : count_(std::make_shared<int64_t>(other.value())) {}
  AveragerSteps(AveragerSteps&&) = default;
  AveragerSteps& operator=(AveragerSteps other) {
    count_ = std::move(other.count_);
    return *this;
  }

  int64_t value() const { return *count_; }
  void set(int64_t step) { *count_ = step; }

  /// The step that is made now. `action` says what is done in a step, where a recorder looks on.
  int64_t next(const char* averager, const std::function<uint64_t(int64_t step)>& action);

 private:
  std::shared_ptr<int64_t> count_ = std::make_shared<int64_t>(0);
};

}  // namespace detail

struct PeriodicModelAveragerOptions {
  int64_t period = 1;        // steps from one averaging to the next; 1 costs as much as DistributedDataParallel
  int64_t warmup_steps = 0;  // steps before the first
  Group process_group = {};  // null: the current one
};

/// Averages at step `warmup_steps` and every `period` steps from there.
///     PeriodicModelAverager averager({.period = 4, .warmup_steps = 100});
///     for (...) { ...; optimizer.step(); averager.average_parameters(ddp.parameters()); }
class PeriodicModelAverager {
 public:
  explicit PeriodicModelAverager(PeriodicModelAveragerOptions options);

  /// Call it once per step, on every rank.
  void average_parameters(const std::vector<at::Tensor>& parameters);

  int64_t step() const { return steps_.value(); }
  void set_step(int64_t step) { steps_.set(step); }

 private:
  PeriodicModelAveragerOptions options_;
  detail::AveragerSteps steps_;
};

struct HierarchicalModelAveragerOptions {
  std::vector<std::pair<int64_t, int>> period_group_sizes;  // {period, ranks}, periods rising, the last with all ranks
  int64_t warmup_steps = 0;
  Group process_group = {};  // null: the current one
};

/// Averages among few ranks often and among more ranks rarely. At a step that several periods divide, the largest
/// counts.
///     HierarchicalModelAverager averager({.period_group_sizes = {{4, 8}, {16, 16}}, .warmup_steps = 100});
/// Makes a group per level, so every rank of the process group constructs it.
class HierarchicalModelAverager {
 public:
  explicit HierarchicalModelAverager(HierarchicalModelAveragerOptions options);

  /// Call it once per step, on every rank.
  void average_parameters(const std::vector<at::Tensor>& parameters);

  int64_t step() const { return steps_.value(); }
  void set_step(int64_t step) { steps_.set(step); }

 private:
  struct Level {
    int64_t period;
    Group group;
  };

  std::vector<Level> levels_;
  int64_t warmup_steps_;
  detail::AveragerSteps steps_;
};

namespace detail {
std::vector<at::Tensor> parameters_of(const std::vector<torch::optim::OptimizerParamGroup>& groups);
int64_t read_averager_step(torch::serialize::InputArchive& archive);
void write_averager_step(torch::serialize::OutputArchive& archive, int64_t step);
}  // namespace detail

/// An optimizer that averages the parameters after each of its steps, when the averager is due. With the hook
/// `post_local_sgd` whose `start_iter` is the averager's `warmup_steps`, this is post-local SGD (arXiv 1808.07217).
///     PostLocalSGDOptimizer optimizer(torch::optim::SGD(ddp.parameters(), 0.1), PeriodicModelAverager({.period = 4}));
template <class Optimizer, class Averager = PeriodicModelAverager>
class PostLocalSGDOptimizer {
 public:
  PostLocalSGDOptimizer(Optimizer optimizer, Averager averager)
      : optimizer_(std::move(optimizer)), averager_(std::move(averager)) {}

  at::Tensor step(torch::optim::Optimizer::LossClosure closure = nullptr) {
    at::Tensor loss = optimizer_.step(std::move(closure));
    averager_.average_parameters(detail::parameters_of(optimizer_.param_groups()));
    return loss;
  }

  void zero_grad(bool set_to_none = true) { optimizer_.zero_grad(set_to_none); }
  void add_param_group(const torch::optim::OptimizerParamGroup& group) { optimizer_.add_param_group(group); }
  std::vector<torch::optim::OptimizerParamGroup>& param_groups() { return optimizer_.param_groups(); }

  /// The optimizer's state and the averager's step. An archive of the optimizer alone starts the warm-up again.
  void save(torch::serialize::OutputArchive& archive) const {
    optimizer_.save(archive);
    detail::write_averager_step(archive, averager_.step());
  }
  void load(torch::serialize::InputArchive& archive) {
    optimizer_.load(archive);
    averager_.set_step(detail::read_averager_step(archive));
  }

  Optimizer& optimizer() { return optimizer_; }
  Averager& averager() { return averager_; }

 private:
  Optimizer optimizer_;
  Averager averager_;
};

}  // namespace serried
