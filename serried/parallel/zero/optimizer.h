// ZeroRedundancyOptimizer without the type of the optimizer that each rank runs.
#pragma once

#include <torch/optim/optimizer.h>

#include <functional>
#include <memory>
#include <vector>

#include "serried/comm/group.h"
#include "serried/parallel/zero/bucket.h"
#include "serried/parallel/zero/partition.h"

namespace serried {

struct ZeroOptions {
  Group process_group = {};                // default: the current group
  bool parameters_as_bucket_view = false;  // parameters of one owner share one flat tensor: no copies in step()
};

namespace detail {

class ZeroOptimizer : public torch::optim::Optimizer {
 public:
  /// An optimizer over some of the parameters.
  using MakeLocal = std::function<std::unique_ptr<torch::optim::Optimizer>(const ParamGroups&)>;

  ZeroOptimizer(const ParamGroups& groups, MakeLocal make_local, const ZeroOptions& options);

  /// Runs `closure`, updates this rank's own parameters, then every owner broadcasts its own. All ranks call it;
  /// options in param_groups() take effect. ValueError for a sparse gradient.
  at::Tensor step(LossClosure closure = nullptr) override;

  /// All ranks call it, with the same parameters. Called through a reference to torch::optim::Optimizer it takes effect
  /// at the next step().
  void add_param_group(const torch::optim::OptimizerParamGroup& group);

  /// Gathers the state of all ranks on rank `to`, where state() and save() then give it, until the next step().
  /// All ranks call it; elsewhere state() stays empty.
  void consolidate_state_dict(int to = 0);

  /// What an optimizer over all parameters would save. ValueError on a rank that does not hold the consolidated state.
  void save(torch::serialize::OutputArchive& archive) const override;

  /// Takes what `save` wrote here or in an ordinary optimizer of the same type, and keeps this rank's part. Every rank
  /// calls it; communicates nothing, so that the number of ranks may differ from that which saved.
  void load(torch::serialize::InputArchive& archive) override;

  /// The rank that updates `parameter`; ValueError for one that this optimizer does not have.
  int owner_of(const at::Tensor& parameter) const;

  const Group& process_group() const { return group_; }

 protected:
  torch::optim::Optimizer& local() const { return *local_; }

 private:
  void take_new_parameters();
  void check_gradients_are_dense() const;
  void forget_consolidated();
  std::unique_ptr<torch::optim::Optimizer> make_over(const ParamGroups& groups) const;

  Group group_;
  MakeLocal make_local_;
  bool as_views_;
  ZeroPartition partition_;
  size_t num_taken_ = 0;  // parameters that have owners
  std::vector<ZeroBucket> buckets_;
  std::unique_ptr<torch::optim::Optimizer> local_;  // over this rank's own parameters
  bool is_consolidated_ = false;                    // state_ holds everybody's
};

}  // namespace detail
}  // namespace serried
