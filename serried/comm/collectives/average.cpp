// Widening, and the one dtype that has no wider one.
#include "serried/comm/collectives/average.h"

#include <ATen/ATen.h>

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

}  // namespace serried::detail
