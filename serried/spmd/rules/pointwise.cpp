// Rules of elementwise ops that are linear in an operand, or that the dispatcher does not tag as pointwise.
#include "serried/spmd/rules/tables.h"

namespace serried::spmd {
namespace {

// Integers raise where they are divided by zero, so no rank may be without elements and compute on zeros instead.
std::string rounded_div(const Call& call) {
  const TensorArg* divisor = call.tensor("other");
  const bool raises = divisor != nullptr && c10::isIntegralType(divisor->dtype, /*includeBool=*/true);
  return raises ? "!..., !... -> ...; ones" : "!..., !... -> ...";
}

// Rounding is what makes a quotient not linear.
std::string div(const Call& call) {
  return call.text("rounding_mode").empty() ? "..., !... -> ..." : rounded_div(call);
}

}  // namespace

RuleTable pointwise_rules() {
  return {
      "pointwise",
      detail::joined({
          each("... + ... -> ...", "add rsub sub"),
          each("..., ... -> ...", "mul multiply"),
          each("... -> ...", "deg2rad neg rad2deg"),
          each("... => ...", "positive"),
          each("..., !... -> ...",
               "_masked_scale elu_backward gelu_backward hardshrink_backward hardsigmoid_backward hardswish_backward "
               "hardtanh_backward leaky_relu_backward logit_backward mish_backward native_dropout_backward "
               "sigmoid_backward silu_backward softplus_backward softshrink_backward special_xlog1py tanh_backward "
               "threshold_backward true_divide"),
          each("..., !..., !... -> ...", "log_sigmoid_backward rrelu_with_noise_backward"),
          each("... + ..., !... -> ...", "addcdiv lerp"),
          each("!..., ... + ... => ...", "where.self"),
          each("!... -> ...", "hardswish"),
          each("!... -> ..., ...", "frexp log_sigmoid_forward"),
          each("!..., !... -> ...",
               "__irshift__ _add_relu _prelu_kernel _standard_gamma_grad special_xlog1py.self_scalar"),
          each("!..., !..., !... -> ...", "_dirichlet_grad"),
          each(rounded_div, "floor_divide fmod remainder"),
          {
              {"_prelu_kernel_backward", "..., !..., !... -> ..., ..."},
              {"addcmul", "... + ..., ... -> ..."},
              {"div", "..., !... -> ..."},
              {"div.Scalar_mode", div},
              {"div.Tensor_mode", div},
              {"div.out_mode", div},
              {"divide", "..., !... -> ..."},
              {"divide.Scalar_mode", div},
              {"divide.Tensor_mode", div},
              {"divide.out_mode", div},
          },
      }),
  };
}

}  // namespace serried::spmd
