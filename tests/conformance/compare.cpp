// Whether a result is the recorded one.
#include "tests/conformance/compare.h"

#include <torch/torch.h>

#include <cmath>

namespace serried::testing {
namespace {

constexpr double kOfLargest = 1e-5;
constexpr double kOfEach = 1e-4;

// As doubles, complex numbers as pairs of them.
at::Tensor as_doubles(const at::Tensor& x) {
  if (!x.is_complex()) return x.to(at::kDouble).contiguous();
  return at::view_as_real(x.resolve_conj().to(at::kComplexDouble).contiguous());
}

double largest_finite(const at::Tensor& x) {
  const at::Tensor finite = at::where(x.isfinite(), x.abs(), at::zeros_like(x));
  return finite.numel() == 0 ? 0 : finite.max().item<double>();
}

std::string shape_text(const at::Tensor& x) {
  return c10::str(x.scalar_type(), x.sizes());
}

std::string tensor_difference(const at::Tensor& got, const at::Tensor& want) {
  if (got.sizes() != want.sizes() || got.scalar_type() != want.scalar_type()) {
    return c10::str("got ", shape_text(got), ", want ", shape_text(want));
  }
  if (want.numel() == 0 || got.equal(want)) return "";
  if (!want.is_floating_point() && !want.is_complex()) {
    return c10::str(got.ne(want).sum().item<int64_t>(), " of ", want.numel(), " elements differ");
  }
  const at::Tensor a = as_doubles(got), b = as_doubles(want);
  const at::Tensor size = want.is_complex() ? want.abs().to(at::kDouble).unsqueeze(-1) : b.abs();
  const double scale = std::max(1.0, largest_finite(size));
  const at::Tensor allowed = at::where(size.isfinite(), size, at::zeros_like(size)) * kOfEach + kOfLargest * scale;
  const at::Tensor near = (a - b).abs().le(allowed);
  const at::Tensor same = near.logical_or(a.eq(b)).logical_or(a.isnan().logical_and(b.isnan()));
  if (same.all().item<bool>()) return "";
  const at::Tensor gap = at::where(same, at::zeros_like(a), (a - b).abs());
  return c10::str(same.logical_not().sum().item<int64_t>(), " of ", same.numel(), " numbers differ, by up to ",
                  gap.max().item<double>());
}

double as_double(const c10::IValue& value) {
  if (value.isInt()) return double(value.toInt());
  return value.isBool() ? double(value.toBool()) : value.toDouble();
}

std::string number_difference(const c10::IValue& got, const c10::IValue& want) {
  if (!got.isScalar()) return c10::str("got ", got.tagKind(), ", want a number");
  if (!want.isDouble()) return got == want ? "" : c10::str("got ", got, ", want ", want);
  const double a = as_double(got), b = as_double(want);
  if (a == b || (std::isnan(a) && std::isnan(b))) return "";
  const double allowed = kOfLargest * std::max(1.0, std::abs(b)) + kOfEach * std::abs(b);
  return std::isfinite(b) && std::abs(a - b) <= allowed ? "" : c10::str("got ", a, ", want ", b);
}

bool is_absent(const c10::IValue& value) {
  return value.isNone() || (value.isTensor() && !value.toTensor().defined());
}

}  // namespace

std::string difference(const c10::IValue& got, const c10::IValue& want) {
  if (is_absent(got) || is_absent(want)) return is_absent(got) == is_absent(want) ? "" : "one is absent";
  if (want.isTensor()) {
    return got.isTensor() ? tensor_difference(got.toTensor(), want.toTensor()) : "got no tensor";
  }
  if (want.isScalar()) return number_difference(got, want);
  if (!want.isList() && !want.isTuple()) return got == want ? "" : c10::str("got ", got, ", want ", want);
  if (!got.isList() && !got.isTuple()) return "got no list";
  const auto wanted = want.isList() ? want.toListRef() : c10::ArrayRef<c10::IValue>(want.toTupleRef().elements());
  return difference(got.isList() ? got.toListRef() : c10::ArrayRef<c10::IValue>(got.toTupleRef().elements()),
                    wanted.vec());
}

std::string difference(c10::ArrayRef<c10::IValue> got, const std::vector<c10::IValue>& want) {
  if (got.empty() && want.size() == 1 && want[0].isNone()) return "";
  if (got.size() != want.size()) return c10::str("got ", got.size(), " values, want ", want.size());
  for (size_t i = 0; i < want.size(); ++i) {
    const std::string text = difference(got[i], want[i]);
    if (!text.empty()) return c10::str("#", i, ": ", text);
  }
  return "";
}

}  // namespace serried::testing
