// A ZeroRedundancyOptimizer that steps bucket by bucket while backward runs.
#include <c10/core/GradMode.h>

#include <unordered_map>
#include <utility>
#include <vector>

#include "serried/base/error.h"
#include "serried/base/trace.h"
#include "serried/parallel/zero/optimizer.h"

namespace serried::detail {
namespace {

using GradientMap = std::unordered_map<const void*, at::Tensor>;  // by TensorImpl of the parameter

// While a step runs, the optimizer knows tensors that share the parameters' memory, under which their state is filed.
class StandIns {
 public:
  StandIns(torch::optim::Optimizer& optimizer, const GradientMap& gradients) : optimizer_(optimizer) {
    for (auto& group : optimizer_.param_groups()) {
      std::vector<at::Tensor> chosen;
      for (const at::Tensor& parameter : group.params()) {
        const auto found = gradients.find(parameter.unsafeGetTensorImpl());
        if (found == gradients.end()) continue;
        // Shares the version too: autograd refuses a backward through values from before the step.
        chosen.push_back(parameter.detach());
        chosen.back().mutable_grad() = found->second;
        pairs_.emplace_back(parameter, chosen.back());
        move_state(parameter, chosen.back());
      }
      parameters_.push_back(std::exchange(group.params(), std::move(chosen)));
    }
  }
  ~StandIns() {
    for (const auto& [parameter, stand_in] : pairs_) move_state(stand_in, parameter);
    for (size_t g = 0; g < parameters_.size(); ++g) optimizer_.param_groups()[g].params() = std::move(parameters_[g]);
  }
  StandIns(const StandIns&) = delete;

 private:
  void move_state(const at::Tensor& from, const at::Tensor& to) {
    const auto found = optimizer_.state().find(from.unsafeGetTensorImpl());
    if (found == optimizer_.state().end()) return;
    auto state = std::move(found->second);
    optimizer_.state().erase(found);
    optimizer_.state()[to.unsafeGetTensorImpl()] = std::move(state);
  }

  torch::optim::Optimizer& optimizer_;
  std::vector<std::vector<at::Tensor>> parameters_;       // per group, to be put back
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs_;  // parameter, stand-in
};

// Updates those parameters of `optimizer` that `gradients` has an entry for; its other entries are of no concern.
// Neither reads nor writes .grad of a parameter: another thread may be at it.
void step_with_stand_ins(torch::optim::Optimizer& optimizer, const GradientMap& gradients) {
  const trace::Span span("step", trace::kOptimizer);
  const StandIns stand_ins(optimizer, gradients);
  optimizer.step();
}

}  // namespace

void ZeroOptimizer::leave_steps_to_backward() {
  if (!overlaps_) {
    raise<c10::ValueError>({kZero,
                            "a hook cannot make the steps of an optimizer that was made without overlap_with_ddp",
                            "pass {.overlap_with_ddp = true} where the optimizer is made"});
  }
  backward_steps_ = true;
}

void ZeroOptimizer::check_backward_steps() const {
  if (backward_steps_) return;
  raise<c10::ValueError>({kZero, "overlap_with_ddp is set, but no hook makes the steps",
                          "call ddp.register_comm_hook(hooks::with_zero_step(hooks::allreduce(), ddp, optimizer))"});
}

std::vector<c10::intrusive_ptr<c10::ivalue::Future>> ZeroOptimizer::step_part(const std::vector<at::Tensor>& parameters,
                                                                              const std::vector<at::Tensor>& gradients,
                                                                              const Group& group) {
  at::NoGradGuard no_grad;
  forget_consolidated();
  copy_options(param_groups_, local_->param_groups());
  std::vector<at::Tensor> updated;
  GradientMap gradient_of;
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (partition_.owner_of(parameters[i].unsafeGetTensorImpl()) < 0) continue;
    updated.push_back(parameters[i]);
    gradient_of[parameters[i].unsafeGetTensorImpl()] = gradients[i];
  }
  step_with_stand_ins(*local_, gradient_of);
  std::vector<c10::intrusive_ptr<c10::ivalue::Future>> sent;
  if (group->getSize() == 1) return sent;
  for (const ZeroBucket& bucket : make_zero_buckets(updated, partition_)) {
    sent.push_back(start_broadcast(bucket, group));
  }
  return sent;
}

}  // namespace serried::detail
