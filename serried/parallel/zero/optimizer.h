// ZeroRedundancyOptimizer without the type of the optimizer that each rank runs.
#pragma once

#include <torch/optim/optimizer.h>

#include <functional>
#include <memory>
#include <vector>

#include "serried/comm/groups/group.h"
#include "serried/parallel/join.h"
#include "serried/parallel/zero/bucket.h"
#include "serried/parallel/zero/partition.h"

namespace serried {

struct ZeroOptions {
  Group process_group = {};                // default: the current group
  bool parameters_as_bucket_view = false;  // parameters of one owner share one flat tensor: no copies in step()
  bool overlap_with_ddp = false;           // backward() steps, see hooks::with_zero_step; step() only runs its closure
};

namespace detail {

class ZeroOptimizer : public torch::optim::Optimizer, public Joinable {
 public:
  /// An optimizer over some of the parameters.
  using MakeLocal = std::function<std::unique_ptr<torch::optim::Optimizer>(const ParamGroups&)>;

  ZeroOptimizer(const ParamGroups& groups, MakeLocal make_local, const ZeroOptions& options);

  /// Runs `closure`, updates this rank's own parameters, then every owner broadcasts its own. All ranks call it;
  /// options in param_groups() take effect. ValueError for a sparse gradient. With overlap_with_ddp it only runs
  /// `closure`.
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

  /// For checkpoints: the optimizer over this rank's own parameters, whose state the caller may replace. All ranks call
  /// it.
  torch::optim::Optimizer& own_part();

  /// For join: a rank without input goes on updating its own parameters, by the gradients and learning rates of the
  /// others. Name the module that averages the gradients first: join({&ddp, &zero}, ...).
  void main_hook(const JoinNotice& notice) override;
  void post_hook(int /*last_joiner*/) override {}  // every step has left the same parameters everywhere
  Group join_group() const override { return group_; }
  at::Device join_device() const override;

  /// For hooks::with_zero_step, which says that it will make the steps; ValueError without overlap_with_ddp.
  void leave_steps_to_backward();

  /// Updates what this rank owns of `parameters`, which may be of others, too, and starts to send each owner's to all
  /// ranks. Leaves .grad alone, so that backward may go on meanwhile.
  std::vector<c10::intrusive_ptr<c10::ivalue::Future>> step_part(const std::vector<at::Tensor>& parameters,
                                                                 const std::vector<at::Tensor>& gradients,
                                                                 const Group& group);

 protected:
  torch::optim::Optimizer& local() const { return *local_; }

 private:
  void take_new_parameters();
  void step_and_broadcast();
  void share_learning_rates(int source);
  void check_backward_steps() const;
  void check_gradients_are_dense() const;
  void forget_consolidated();
  std::unique_ptr<torch::optim::Optimizer> make_over(const ParamGroups& groups) const;

  Group group_;
  MakeLocal make_local_;
  bool as_views_;
  bool overlaps_;                // with backward
  bool backward_steps_ = false;  // a hook has said so
  ZeroPartition partition_;
  size_t num_taken_ = 0;  // parameters that have owners
  std::vector<ZeroBucket> buckets_;
  std::unique_ptr<torch::optim::Optimizer> local_;  // over this rank's own parameters
  bool is_consolidated_ = false;                    // state_ holds everybody's
};

}  // namespace detail
}  // namespace serried
