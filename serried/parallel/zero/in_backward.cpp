// A ZeroRedundancyOptimizer that steps bucket by bucket while backward runs.
#include <c10/core/GradMode.h>

#include "serried/base/error.h"
#include "serried/parallel/zero/optimizer.h"
#include "serried/parallel/zero/stand_ins.h"

namespace serried::detail {

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
