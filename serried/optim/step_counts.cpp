// Shares counts among parameters, and parts them once they no longer step together.
#include "serried/optim/step_counts.h"

#include <ATen/ATen.h>

#include "serried/tape/tape.h"

namespace serried::detail {

StepCount::StepCount(int64_t value, at::Device device) : value_(value) {
  const tape::Pause off_tape;
  tensor_ = at::full({}, double(value), at::TensorOptions(at::kFloat).device(device));
}

void StepCount::begin() {
  if (!is_written_) {
    const tape::Pause off_tape;
    tensor_.fill_(double(value_));
  }
  is_written_ = false;
}

void StepCount::end() {
  ++value_;
  is_written_ = true;
}

std::vector<StepCountPtr> StepCounts::of(const std::vector<at::Tensor>& params, const std::vector<int64_t>& made) {
  std::vector<StepCountPtr> counts;
  for (const at::Tensor& param : params) {
    counts.push_back(by_param_[param.unsafeGetTensorImpl()]);
    if (counts.back()) ++counts.back()->num_stepping_;
  }
  for (size_t i = 0; i < params.size(); ++i) {
    const StepCountPtr& count = counts[i];
    const bool stays = count && count->value_ == made[i] && count->num_stepping_ == count->num_users_;
    if (!stays) counts[i] = nullptr;
  }
  // Only now, as the numbers of users change.
  std::unordered_map<int64_t, StepCountPtr> fresh;
  for (size_t i = 0; i < params.size(); ++i) {
    StepCountPtr& kept = by_param_[params[i].unsafeGetTensorImpl()];
    if (kept) kept->num_stepping_ = 0;
    if (counts[i]) continue;
    if (kept) --kept->num_users_;
    StepCountPtr& shared = fresh[made[i]];
    if (!shared) shared = std::make_shared<StepCount>(made[i], params[i].device());
    ++shared->num_users_;
    counts[i] = kept = shared;
  }
  return counts;
}

at::Tensor StepCounts::tensor_of(const at::Tensor& param, int64_t made) const {
  const auto found = by_param_.find(param.unsafeGetTensorImpl());
  if (found == by_param_.end() || found->second->value() != made) return {};
  return found->second->tensor();
}

}  // namespace serried::detail
