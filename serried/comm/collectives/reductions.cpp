// Averages are sums in a dtype that holds them; factors are applied without the detour of integers through float.
#include "serried/comm/collectives/reductions.h"

#include <cmath>

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include "serried/base/error.h"

namespace serried::detail {
namespace {

bool is_integer(at::ScalarType dtype) {
  return at::isIntegralType(dtype, /*includeBool=*/false) && dtype != at::kUInt64;
}

/// x = quotient * count + remainder: both sums fit, whatever x is.
at::Tensor quotients_and_remainders(const at::Tensor& x, int64_t count) {
  const at::Tensor quotient = x.div(count, "trunc");
  return at::stack({quotient, x - quotient * count});
}

/// The sums Q and R of the two mean Q + R / count, cut towards zero.
at::Tensor cut_average(const at::Tensor& quotients, const at::Tensor& remainders, int64_t count) {
  const at::Tensor carried = remainders.div(count, "trunc");
  const at::Tensor whole = quotients + carried;
  const at::Tensor rest = remainders - carried * count;
  // Rounding of the parts went past zero's side where the rest has the other sign.
  const at::Tensor up = whole.lt(0).logical_and(rest.gt(0));
  const at::Tensor down = whole.gt(0).logical_and(rest.lt(0));
  return whole + up.to(at::kLong) - down.to(at::kLong);
}

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

at::Tensor average_addends(const at::Tensor& x, int64_t count) {
  const at::ScalarType dtype = x.scalar_type();
  if (dtype == at::kLong) return quotients_and_remainders(x, count);
  if (is_integer(dtype)) return x.to(at::kLong);
  return at::isReducedFloatingType(dtype) ? x.to(at::kFloat) : x;
}

void write_average(const at::Tensor& x, const at::Tensor& sum, int64_t count) {
  if (x.scalar_type() == at::kLong) {
    x.copy_(cut_average(sum[0], sum[1], count));
  } else if (is_integer(x.scalar_type())) {
    x.copy_(sum.div(count, "trunc"));
  } else {
    x.copy_(sum.div_(count));
  }
}

at::Tensor premultiplied(const at::Tensor& x, const c10d::ReduceOp& op) {
  const auto* factor = dynamic_cast<const c10d::PreMulSumSupplement*>(op.supplement_.get());
  if (factor == nullptr) {
    raise<c10::ValueError>({"premul_sum", "the op has no factor", "make it with c10d::makePreMulSum(factor)"});
  }
  at::AutoDispatchBelowAutograd guard;
  return product(x, *factor).to(x.scalar_type()).contiguous();
}

}  // namespace serried::detail
