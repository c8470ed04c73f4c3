// What collectives mean, in plain LibTorch.
#include "tests/support/plain_collectives.h"

#include <algorithm>

namespace serried::testing {
namespace {

using c10d::ReduceOp;

at::Tensor combined(ReduceOp::RedOpType op, const at::Tensor& a, const at::Tensor& b) {
  switch (op) {
    case ReduceOp::PRODUCT: return a * b;
    case ReduceOp::MIN: return at::minimum(a, b);
    case ReduceOp::MAX: return at::maximum(a, b);
    case ReduceOp::BAND: return at::bitwise_and(a, b);
    case ReduceOp::BOR: return at::bitwise_or(a, b);
    case ReduceOp::BXOR: return at::bitwise_xor(a, b);
    default: return a.scalar_type() == at::kBool ? at::logical_or(a, b) : a + b;
  }
}

}  // namespace

at::Tensor reduced(ReduceOp::RedOpType op, const std::vector<at::Tensor>& xs) {
  const at::ScalarType dtype = xs[0].scalar_type();
  const bool average = op == ReduceOp::AVG;
  const bool integers = at::isIntegralType(dtype, /*includeBool=*/false);
  const at::ScalarType wide = average && integers ? at::kLong : at::isReducedFloatingType(dtype) ? at::kFloat : dtype;
  at::Tensor result = xs[0].to(wide);
  for (size_t i = 1; i < xs.size(); ++i) result = combined(op, result, xs[i].to(wide));
  const auto count = int64_t(xs.size());
  if (average) result = integers ? result.div(count, "trunc") : result / count;
  return result.to(dtype);
}

std::vector<int64_t> shard_sizes(int64_t size, int n) {
  std::vector<int64_t> sizes;
  const int64_t share = (size + n - 1) / n;
  for (int r = 0; r < n; ++r) sizes.push_back(std::clamp<int64_t>(size - r * share, 0, share));
  return sizes;
}

}  // namespace serried::testing
