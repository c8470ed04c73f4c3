// Rules of fused optimizers, for one element of every list: parameter, gradient and states lie alike.
#include "serried/spmd/rules/tables.h"

namespace serried::spmd {

namespace {

// The functional form also returns the step counts, which every rank advances alike: neither cut nor a share of a sum,
// so it runs whole.
std::string adagrad(const Call& call) {
  if (call.schema().returns().size() < 4) return "!..., !..., !..., !A, !B?, !C?, !D? -> ..., ..., ...";
  const std::string x = detail::letters('P', call.tensor(0).dim());
  return "!" + x + ", !" + x + ", !" + x + ", !A, !B?, !C?, !D? -> " + x + ", " + x + ", " + x + ", A";
}

}  // namespace

// After the lists come step counts, learning rate, scale and found_inf: single numbers that every rank has whole.
RuleTable optim_rules() {
  return {
      "optim",
      detail::joined({
          each("!..., !..., !..., !..., !...?, !A, !B?, !C?, !D? -> ..., ..., ..., ..., ...",
               "_fused_adam _fused_adamw"),
          each(adagrad, "_fused_adagrad"),
          each("!..., !..., !...?, !B?, !C?, !D? -> ..., ..., ...", "_fused_sgd"),
          each("!..., !..., !... -> ..., ...", "_amp_update_scale"),
      }),
  };
}

}  // namespace serried::spmd
