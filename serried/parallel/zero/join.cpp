// ZeroRedundancyOptimizer on a rank that has no more input.
#include <ATen/ops/empty.h>

#include "serried/comm/collectives/collectives.h"
#include "serried/parallel/zero/optimizer.h"

namespace serried::detail {

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
