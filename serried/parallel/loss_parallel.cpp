// A switch of the dispatcher, which sees every gather.
#include "serried/parallel/loss_parallel.h"

#include <utility>

#include "serried/tensor/guards.h"

namespace serried {

LossParallel::LossParallel(bool enabled) : previous_(std::exchange(detail::class_gathers_forbidden(), enabled)) {}

LossParallel::~LossParallel() {
  detail::class_gathers_forbidden() = previous_;
}

bool LossParallel::is_enabled() {
  return detail::class_gathers_forbidden();
}

}  // namespace serried
