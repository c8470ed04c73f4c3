// A local optimizer over a part of the parameters, and what keeps the parts together.
#include "serried/parallel/zero/optimizer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <torch/serialize.h>

#include <sstream>

#include "serried/base/error.h"
#include "serried/base/trace.h"
#include "serried/comm/agree/rank_texts.h"
#include "serried/comm/collectives/collectives.h"
#include "serried/comm/collectives/watch.h"

namespace serried::detail {

using torch::optim::Optimizer;

ZeroOptimizer::ZeroOptimizer(const ParamGroups& groups, MakeLocal make_local, const ZeroOptions& options)
    : Optimizer(groups, make_local({})->defaults().clone()),
      group_(options.process_group ? options.process_group : require_current_process_group("ZeroRedundancyOptimizer")),
      make_local_(std::move(make_local)),
      as_views_(options.parameters_as_bucket_view),
      overlaps_(options.overlap_with_ddp),
      partition_(group_->getSize()) {
  take_new_parameters();
}

// LibTorch merges the options of a group with the defaults: a value that was set back to the type's default would be
// lost, so the options are copied once more.
std::unique_ptr<Optimizer> ZeroOptimizer::make_over(const ParamGroups& groups) const {
  std::unique_ptr<Optimizer> made = make_local_(groups);
  copy_options(groups, made->param_groups());
  return made;
}

void ZeroOptimizer::take_new_parameters() {
  if (local_ && num_parameters(param_groups_) == num_taken_) return;
  remove_repeats(param_groups_);
  check_plain(param_groups_);
  check_same_on_all_ranks(param_groups_, group_);
  const std::vector<at::Tensor> added = partition_.extend(param_groups_);
  for (ZeroBucket& bucket : make_zero_buckets(added, partition_)) {
    if (as_views_) lay_flat(bucket, group_);
    buckets_.push_back(std::move(bucket));
  }
  // Anew, not Optimizer::add_param_group: Adagrad makes its state in the constructor only.
  std::unique_ptr<Optimizer> larger = make_over(partition_.part_of(group_->getRank(), param_groups_));
  if (local_) {
    for (auto& [parameter, state] : local_->state()) larger->state()[parameter] = std::move(state);
  }
  local_ = std::move(larger);
  num_taken_ = num_parameters(param_groups_);
  forget_consolidated();
}

void ZeroOptimizer::add_param_group(const torch::optim::OptimizerParamGroup& group) {
  Optimizer::add_param_group(group);
  take_new_parameters();
}

at::Tensor ZeroOptimizer::step(LossClosure closure) {
  if (overlaps_) check_backward_steps();
  at::Tensor loss;
  if (closure) {
    at::AutoGradMode with_gradients(true);
    loss = closure();
  }
  take_new_parameters();
  if (overlaps_) return loss;
  check_gradients_are_dense();
  if (const auto notice = notify_join()) share_learning_rates(notice->source());
  step_and_broadcast();
  return loss;
}

void ZeroOptimizer::step_and_broadcast() {
  const trace::Span span("step", trace::kOptimizer);
  const watch::PartOf scope("ZeRO's parameters");
  forget_consolidated();
  copy_options(param_groups_, local_->param_groups());
  local_->step();
  for (ZeroBucket& bucket : buckets_) broadcast_from_owner(bucket, group_);
}

// All parameters, not only this rank's: every rank raises, none waits for another.
void ZeroOptimizer::check_gradients_are_dense() const {
  int64_t index = 0;
  for (const auto& group : param_groups_) {
    for (const at::Tensor& parameter : group.params()) {
      if (parameter.grad().defined() && parameter.grad().layout() != at::kStrided) {
        raise<c10::ValueError>(
            {kZero,
             c10::str("the gradient of parameter ", index, ", ", watch::describe_tensor(parameter), ", is sparse"),
             "build its module with .sparse(false), or give it to an ordinary optimizer"});
      }
      ++index;
    }
  }
}

void ZeroOptimizer::forget_consolidated() {
  state_.clear();
  is_consolidated_ = false;
}

void ZeroOptimizer::consolidate_state_dict(int to) {
  if (to < 0 || to >= group_->getSize()) {
    raise<c10::ValueError>({kZero, c10::str("consolidate_state_dict(", to, ") in a group of ", group_->getSize()),
                            c10::str("pass a rank of the group: 0 to ", group_->getSize() - 1)});
  }
  take_new_parameters();
  forget_consolidated();
  std::ostringstream mine;
  torch::save(*local_, mine);
  const std::vector<std::string> all = gather_bytes(std::move(mine).str(), group_, to);
  for (size_t rank = 0; rank < all.size(); ++rank) {
    const std::unique_ptr<Optimizer> theirs = make_over(partition_.part_of(int(rank), param_groups_));
    std::istringstream bytes(all[rank]);
    torch::load(*theirs, bytes);
    for (auto& [parameter, state] : theirs->state()) state_[parameter] = std::move(state);
  }
  is_consolidated_ = group_->getRank() == to;
}

void ZeroOptimizer::save(torch::serialize::OutputArchive& archive) const {
  if (!is_consolidated_) {
    const int rank = group_->getRank();
    raise<c10::ValueError>({kZero, c10::str("rank ", rank, " holds only its own part of the state"),
                            c10::str("call consolidate_state_dict(", rank,
                                     ") on every rank after the last step(), then save on rank ", rank)});
  }
  const std::unique_ptr<Optimizer> whole = make_over(param_groups_);
  whole->state().clear();
  for (const auto& [parameter, state] : state_) whole->state()[parameter] = state->clone();
  whole->save(archive);
}

void ZeroOptimizer::load(torch::serialize::InputArchive& archive) {
  take_new_parameters();
  const std::unique_ptr<Optimizer> whole = make_over(param_groups_);
  whole->load(archive);
  copy_options(whole->param_groups(), param_groups_);
  local_->state().clear();
  for (auto& [parameter, state] : whole->state()) {
    if (partition_.owner_of(parameter) == group_->getRank()) local_->state()[parameter] = std::move(state);
  }
  forget_consolidated();
}

Optimizer& ZeroOptimizer::own_part() {
  take_new_parameters();
  forget_consolidated();
  return *local_;
}

int ZeroOptimizer::owner_of(const at::Tensor& parameter) const {
  const int owner = partition_.owner_of(parameter.unsafeGetTensorImpl());
  if (owner >= 0) return owner;
  raise<c10::ValueError>({kZero, c10::str(watch::describe_tensor(parameter), " is not a parameter of this optimizer"),
                          "pass a tensor of param_groups(), not a copy of it"});
}

void ZeroOptimizer::main_hook(const JoinNotice& notice) {
  share_learning_rates(notice.source());
  step_and_broadcast();
}

at::Device ZeroOptimizer::join_device() const {
  return buckets_.at(0).parameters.at(0).device();
}

// The schedulers of a rank that has joined stand still, while it still updates its own parameters.
void ZeroOptimizer::share_learning_rates(int source) {
  at::Tensor rates = at::empty({int64_t(param_groups_.size())}, at::kDouble);
  for (size_t g = 0; g < param_groups_.size(); ++g) rates.data_ptr<double>()[g] = param_groups_[g].options().get_lr();
  rates = rates.to(join_device());
  broadcast_(rates, group_, {.src = source});
  rates = rates.cpu();
  for (size_t g = 0; g < param_groups_.size(); ++g) param_groups_[g].options().set_lr(rates.data_ptr<double>()[g]);
}

}  // namespace serried::detail
