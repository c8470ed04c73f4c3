// The product, without the detour of integers through float.
#include "serried/comm/collectives/premultiply.h"

#include <cmath>

#include <ATen/core/LegacyTypeDispatch.h>

#include "serried/base/error.h"

namespace serried::detail {
namespace {

// An integer times a number that is none would be a float, which has not the digits.
at::Tensor product(const at::Tensor& x, const c10d::PreMulSumSupplement& factor) {
  const bool is_integer = at::isIntegralType(x.scalar_type(), /*includeBool=*/true);
  if (factor.tensor_factor.defined()) {
    const bool widen = is_integer && factor.tensor_factor.is_floating_point();
    return (widen ? x.to(at::kDouble) : x).mul(factor.tensor_factor);
  }
  if (!is_integer) return x.mul(factor.double_factor);
  if (std::abs(factor.double_factor) < 0x1p53 && std::trunc(factor.double_factor) == factor.double_factor) {
    return x.to(at::kLong).mul(int64_t(factor.double_factor));
  }
  return x.to(at::kDouble).mul(factor.double_factor);
}

}  // namespace

at::Tensor premultiplied(const at::Tensor& x, const c10d::ReduceOp& op) {
  const auto* factor = dynamic_cast<const c10d::PreMulSumSupplement*>(op.supplement_.get());
  if (factor == nullptr) {
    raise<c10::ValueError>({"premul_sum", "the op has no factor", "make it with c10d::makePreMulSum(factor)"});
  }
  at::AutoDispatchBelowAutograd guard;
  return product(x, *factor).to(x.scalar_type()).contiguous();
}

}  // namespace serried::detail
