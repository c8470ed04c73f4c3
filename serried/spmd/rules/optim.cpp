// Rules of fused optimizers, for one element of every list: parameter, gradient and states lie alike.
#include "serried/spmd/detail/rule_text.h"
#include "serried/spmd/rules/tables.h"

namespace serried::spmd {

// After the lists come step counts, learning rate, scale and found_inf: single numbers that every rank has whole.
RuleTable optim_rules() {
  return {
      "optim",
      detail::joined({
          each("!..., !..., !..., !..., !...?, !A, !B?, !C?, !D? -> ..., ..., ..., ..., ...",
               "_fused_adam _fused_adamw"),
          each("!..., !..., !..., !A, !B?, !C?, !D? -> ..., ..., ..., A", "_fused_adagrad"),
          each("!..., !..., !...?, !B?, !C?, !D? -> ..., ..., ...", "_fused_sgd"),
          each("!..., !..., !... -> ..., ...", "_amp_update_scale"),
      }),
  };
}

}  // namespace serried::spmd
