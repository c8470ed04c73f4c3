// Reductions that no single rule covers, done part by part: variances, norms, logsumexp, extrema in pairs.
#include <ATen/ATen.h>

#include <cmath>
#include <optional>
#include <tuple>

#include "serried/tensor/dispatch/handlers.h"
#include "serried/tensor/dispatch/local_only.h"
#include "serried/tensor/handlers/part_reduction.h"

namespace serried {
namespace {

using detail::accumulated;
using detail::LocalOnly;
using detail::OpCall;
using detail::PartReduction;
using torch::jit::Stack;

// The reduction that `call` asks for, where it has to be put together from parts.
std::optional<PartReduction> parts_of(const OpCall& call) {
  if (call.has_out()) return std::nullopt;
  const DTensorMeta* meta = dtensor_meta(call.argument(0).toTensor());
  if (meta == nullptr || meta->spec->sizes.empty()) return std::nullopt;
  std::vector<int64_t> dims = call.dims("dim", int64_t(meta->spec->sizes.size()));
  std::sort(dims.begin(), dims.end());
  const bool in_range = dims.front() >= 0 && dims.back() < int64_t(meta->spec->sizes.size());
  if (!in_range || !PartReduction::is_needed(*meta, dims)) return std::nullopt;
  return PartReduction(*meta, std::move(dims));
}

struct Moments {
  at::Tensor mean;      // put together, with keepdim; undefined where nobody asked
  at::Tensor variance;  // times the divisor: pending sum over ranks, with keepdim
};

// Chan's formula: the parts' own deviations and those of their means from the common mean. Stable, and the only
// temporaries are as small as the result. Means are taken relative to one of them: where all elements are equal, so
// that autograd sees it, the variance is 0 and not the square of what rounding leaves.
Moments moments(const PartReduction& parts, bool with_mean) {
  const at::ScalarType dtype = accumulated(parts.local().scalar_type());
  at::Tensor mean = parts.none(dtype);
  at::Tensor variance = parts.none(c10::toRealValueType(dtype));
  if (parts.local_count() > 0) {
    std::tie(variance, mean) = at::var_mean(parts.local().to(dtype), parts.dims(), /*correction=*/0, /*keepdim=*/true);
  }
  const double count = double(parts.local_count());
  const double share = count / double(parts.count());
  const at::Tensor first = parts.of_first(mean);
  const at::Tensor from_first = parts.local_count() > 0 ? mean - first : at::zeros_like(mean);
  const at::Tensor shift = parts.reduced(from_first * share, ReduceKind::sum);
  const at::Tensor away = (from_first - shift).abs();
  // Not first + shift: of infinite elements there is a mean, but no difference.
  return {with_mean ? parts.reduced(mean * share, ReduceKind::sum) : at::Tensor(), (variance + away * away) * count};
}

bool has_numbers(const at::Tensor& t) {
  return t.is_floating_point() || t.is_complex();
}

// Whether a part may have one result where the whole has several.
bool is_one_of_many(const OpCall& call) {
  const at::Tensor& self = call.argument(0).toTensor();
  if (call.has_out() || !self.is_floating_point() || self.dim() == 0) return false;
  int64_t reduced = 1;
  for (const int64_t dim : call.dims("dim", self.dim())) reduced *= self.size(dim);
  return reduced < self.numel();
}

// ATen's std and var of a single result subtract a mean that was rounded; those of several do not, nor do the pairs.
at::Tensor without_mean(const OpCall& call, bool is_std, double correction, bool keepdim) {
  const at::Tensor& self = call.argument(0).toTensor();
  const std::vector<int64_t> dims = call.dims("dim", self.dim());
  return std::get<0>(is_std ? at::std_mean(self, dims, at::Scalar(correction), keepdim)
                            : at::var_mean(self, dims, at::Scalar(correction), keepdim));
}

bool variance(const c10::OperatorHandle& op, Stack& stack, bool is_std, bool with_mean) {
  const OpCall call(op, stack);
  if (!has_numbers(call.argument(0).toTensor())) return false;
  const std::optional<PartReduction> parts = parts_of(call);
  const bool keepdim = call.flag("keepdim");
  const double by_default = call.has("unbiased") ? double(call.flag("unbiased", true)) : 1.0;
  const double correction = call.number("correction", by_default);
  if (!parts || parts->count() == 0) {
    return !with_mean && is_one_of_many(call) &&
           detail::finish(op, stack, {without_mean(call, is_std, correction, keepdim)});
  }
  const at::ScalarType dtype = call.argument(0).toTensor().scalar_type();
  at::Tensor result;
  at::Tensor mean;
  {
    const LocalOnly guard;
    const Moments found = moments(*parts, with_mean);
    const at::Tensor part = found.variance / std::max(0.0, double(parts->count()) - correction);
    const at::Tensor whole = parts->reduced(part, ReduceKind::sum);
    result = parts->as_dtensor((is_std ? whole.sqrt() : whole).to(c10::toRealValueType(dtype)), keepdim);
    if (with_mean) mean = parts->as_dtensor(found.mean.to(dtype), keepdim);
  }
  return with_mean ? detail::finish(op, stack, {result, mean}) : detail::finish(op, stack, {result});
}

bool run_var(const c10::OperatorHandle& op, Stack& stack) {
  return variance(op, stack, false, false);
}
bool run_std(const c10::OperatorHandle& op, Stack& stack) {
  return variance(op, stack, true, false);
}
bool run_var_mean(const c10::OperatorHandle& op, Stack& stack) {
  return variance(op, stack, false, true);
}
bool run_std_mean(const c10::OperatorHandle& op, Stack& stack) {
  return variance(op, stack, true, true);
}

// Norms of order p: sums of p-th powers add up over parts. Orders 0, 1 and infinity have rules.
bool run_norm(const c10::OperatorHandle& op, Stack& stack) {
  const OpCall call(op, stack);
  const double order = call.number(call.has("ord") ? "ord" : "p", 2);
  if (order == 0 || order == 1 || std::isinf(order)) return false;
  const auto dtype =
      static_cast<at::ScalarType>(call.integer("dtype", int64_t(call.argument(0).toTensor().scalar_type())));
  if (!c10::isFloatingType(dtype) && !c10::isComplexType(dtype)) return false;
  const std::optional<PartReduction> parts = parts_of(call);
  if (!parts) return false;
  at::Tensor result;
  {
    const LocalOnly guard;
    const at::ScalarType wide = accumulated(dtype);
    at::Tensor part = parts->none(c10::toRealValueType(wide));
    if (parts->local_count() > 0) {
      part = at::linalg_vector_norm(parts->local().to(wide), order, parts->dims(), /*keepdim=*/true).pow(order);
    }
    const at::Tensor whole = parts->reduced(part, ReduceKind::sum).pow(1 / order);
    result = parts->as_dtensor(whole.to(c10::toRealValueType(dtype)), call.flag("keepdim"));
  }
  return detail::finish(op, stack, {result});
}

bool run_logsumexp(const c10::OperatorHandle& op, Stack& stack) {
  const OpCall call(op, stack);
  const std::optional<PartReduction> parts = parts_of(call);
  if (!parts || parts->count() == 0) return false;
  at::Tensor result;
  {
    const LocalOnly guard;
    at::Tensor x = parts->local();
    const at::ScalarType dtype = has_numbers(x) ? x.scalar_type() : at::typeMetaToScalarType(at::get_default_dtype());
    if (x.is_complex()) return false;
    x = x.to(accumulated(dtype));
    const at::Tensor part = at::logsumexp(x, parts->dims(), /*keepdim=*/true);
    const at::Tensor largest = parts->reduced(part, ReduceKind::max);
    // exp(x - inf) would be nan.
    const at::Tensor shift = largest.masked_fill(largest.isinf(), 0);
    const at::Tensor whole = parts->reduced((part - shift).exp(), ReduceKind::sum).log() + shift;
    result = parts->as_dtensor(whole.to(dtype), call.flag("keepdim"));
  }
  return detail::finish(op, stack, {result});
}

bool run_aminmax(const c10::OperatorHandle& op, Stack& stack) {
  const OpCall call(op, stack);
  if (!parts_of(call)) return false;
  const at::Tensor& self = call.argument(0).toTensor();
  const std::vector<int64_t> dims = call.dims("dim", self.dim());
  const bool keepdim = call.flag("keepdim");
  return detail::finish(op, stack, {at::amin(self, dims, keepdim), at::amax(self, dims, keepdim)});
}

bool run_dist(const c10::OperatorHandle& op, Stack& stack) {
  const OpCall call(op, stack);
  if (call.has_out()) return false;
  const at::Tensor apart = at::sub(call.argument(0).toTensor(), call.argument(1).toTensor());
  return detail::finish(op, stack, {at::linalg_vector_norm(apart, call.number("p", 2))});
}

template <class Fn>
bool for_each(const c10::OperatorHandle& op, Stack& stack, Fn fn) {
  const OpCall call(op, stack);
  if (call.has_out()) return false;
  std::vector<at::Tensor> results;
  for (const at::Tensor& tensor : call.argument(0).toTensorVector()) results.push_back(fn(call, tensor));
  return detail::finish(op, stack, {results});
}

std::optional<at::ScalarType> dtype_of(const spmd::Call& call) {
  if (call.value("dtype") == nullptr) return std::nullopt;
  return static_cast<at::ScalarType>(call.integer("dtype"));
}

bool run_foreach_norm(const c10::OperatorHandle& op, Stack& stack) {
  return for_each(op, stack, [](const spmd::Call& call, const at::Tensor& x) {
    return at::linalg_vector_norm(x, call.number("ord", 2), std::nullopt, false, dtype_of(call));
  });
}
bool run_foreach_powsum(const c10::OperatorHandle& op, Stack& stack) {
  return for_each(op, stack, [](const spmd::Call& call, const at::Tensor& x) {
    return at::sum(at::pow(at::abs(x), call.number("ord", 2)), dtype_of(call));
  });
}
bool run_foreach_max(const c10::OperatorHandle& op, Stack& stack) {
  return for_each(op, stack, [](const spmd::Call&, const at::Tensor& x) { return at::max(x); });
}

}  // namespace

std::vector<HandlerEntry> reduction_handlers() {
  return {
      {"aten::_foreach_max", run_foreach_max},
      {"aten::_foreach_norm", run_foreach_norm},
      {"aten::_foreach_powsum", run_foreach_powsum},
      {"aten::aminmax", run_aminmax},
      {"aten::dist", run_dist},
      {"aten::linalg_vector_norm", run_norm},
      {"aten::logsumexp", run_logsumexp},
      {"aten::norm", run_norm},
      {"aten::std", run_std},
      {"aten::std_mean", run_std_mean},
      {"aten::var", run_var},
      {"aten::var_mean", run_var_mean},
  };
}

}  // namespace serried
