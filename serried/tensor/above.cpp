// The ops that consume marked parameters, above autograd: what comes in and what goes out is brought to the layouts
// that the parameter asks for, differentiably.
#include "serried/tensor/above.h"

#include <ATen/Operators.h>
#include <torch/library.h>

#include "serried/base/error.h"
#include "serried/tensor/above_key.h"
#include "serried/tensor/cast_inputs.h"
#include "serried/tensor/dtensor.h"
#include "serried/tensor/enter.h"
#include "serried/tensor/gather_on_use.h"
#include "serried/tensor/meta.h"

namespace serried {
namespace {

using c10::DispatchKeySet;
using detail::Role;
using detail::RoleLayouts;
using detail::UseLayouts;

constexpr DispatchKeySet kBelow(DispatchKeySet::FULL_AFTER, kAboveKey);

const UseLayouts* layouts_of(const at::Tensor& t) {
  const ParameterUse* use = detail::use_of(t);
  return use != nullptr ? use->layouts.get() : nullptr;
}

// One call of an op that has a marked parameter. A consumer that is made of ops hides the mark from them: what came in
// is in place already.
class Consumption {
 public:
  Consumption(const at::Tensor& parameter, Role role, bool transposed) : parameter_(parameter) {
    layouts_ = layouts_of(parameter);
    if (layouts_ == nullptr || layouts_->is_transpose != transposed || !layouts_->of(role).has_value()) return;
    asked_ = &*layouts_->of(role);
    role_ = role;
  }

  explicit operator bool() const { return asked_ != nullptr; }

  at::Tensor enter(const at::Tensor& x) const {
    return detail::enter(x, layouts_->mesh, asked_->input, role_ == Role::matrix ? in_features() : -1);
  }

  at::Tensor leave(at::Tensor y) const {
    if (!asked_->output.is_asked()) return y;
    const DTensorMeta* meta = dtensor_meta(y);
    if (meta == nullptr) return y;
    const Placements& due = asked_->output.of(y.dim());
    return meta->spec->placements == due ? y : at::Tensor(DTensor(std::move(y)).redistribute(due));
  }

 private:
  int64_t in_features() const { return parameter_.size(layouts_->is_transpose ? 0 : 1); }

  const at::Tensor& parameter_;
  const UseLayouts* layouts_ = nullptr;
  const RoleLayouts* asked_ = nullptr;
  Role role_ = Role::matrix;
};

// The rows of matrix products in torch::nn are `x.mm(w.t())`: a marked matrix is consumed as its transpose, on the
// right. The gradient of that, `grad.mm(w)`, has the matrix itself there and passes.
Consumption as_transposed_matrix(const at::Tensor& right) {
  return Consumption(right, Role::matrix, /*transposed=*/true);
}

const at::Tensor& tensor_or_undefined(const std::optional<at::Tensor>& t) {
  static const at::Tensor undefined;
  return t.has_value() ? *t : undefined;
}

void hand_on(const at::Tensor& base, const at::Tensor& transpose) {
  const UseLayouts* layouts = layouts_of(base);
  if (layouts == nullptr || layouts->transposed == nullptr) return;
  set_use(transpose, layouts->transposed);
}

at::Tensor t(DispatchKeySet keys, const at::Tensor& self) {
  at::Tensor result = at::_ops::t::redispatch(keys & kBelow, self);
  if (self.dim() == 2) hand_on(self, result);
  return result;
}

at::Tensor transpose(DispatchKeySet keys, const at::Tensor& self, int64_t dim0, int64_t dim1) {
  at::Tensor result = at::_ops::transpose_int::redispatch(keys & kBelow, self, dim0, dim1);
  if (self.dim() == 2 && (dim0 - dim1) % 2 != 0) hand_on(self, result);
  return result;
}

at::Tensor mm(DispatchKeySet keys, const at::Tensor& self, const at::Tensor& mat2) {
  if (const auto dtype = detail::cast_beside(self, mat2)) return mm(keys, self.to(*dtype), mat2);
  const Consumption use = as_transposed_matrix(mat2);
  if (!use) return at::_ops::mm::redispatch(keys & kBelow, self, mat2);
  return use.leave(at::_ops::mm::redispatch(keys & kBelow, use.enter(self), mat2));
}

at::Tensor addmm(DispatchKeySet keys, const at::Tensor& self, const at::Tensor& mat1, const at::Tensor& mat2,
                 const at::Scalar& beta, const at::Scalar& alpha) {
  if (const auto d = detail::cast_beside(mat1, mat2)) return addmm(keys, self, mat1.to(*d), mat2, beta, alpha);
  const Consumption use = as_transposed_matrix(mat2);
  if (!use) return at::_ops::addmm::redispatch(keys & kBelow, self, mat1, mat2, beta, alpha);
  return use.leave(at::_ops::addmm::redispatch(keys & kBelow, self, use.enter(mat1), mat2, beta, alpha));
}

at::Tensor matmul(DispatchKeySet keys, const at::Tensor& self, const at::Tensor& other) {
  if (const auto dtype = detail::cast_beside(self, other)) return matmul(keys, self.to(*dtype), other);
  const Consumption use = as_transposed_matrix(other);
  if (!use) return at::_ops::matmul::redispatch(keys & kBelow, self, other);
  const at::Tensor entered = use.enter(self);
  const c10::impl::ExcludeDispatchKeyGuard unmarked(kAboveKey);
  return use.leave(at::_ops::matmul::redispatch(keys & kBelow, entered, other));
}

at::Tensor linear(DispatchKeySet keys, const at::Tensor& input, const at::Tensor& weight,
                  const std::optional<at::Tensor>& bias) {
  if (const auto dtype = detail::cast_beside(input, weight)) return linear(keys, input.to(*dtype), weight, bias);
  const Consumption use(weight, Role::matrix, /*transposed=*/false);
  if (!use) return at::_ops::linear::redispatch(keys & kBelow, input, weight, bias);
  const at::Tensor entered = use.enter(input);
  const c10::impl::ExcludeDispatchKeyGuard unmarked(kAboveKey);
  return use.leave(at::_ops::linear::redispatch(keys & kBelow, entered, weight, bias));
}

at::Tensor embedding(DispatchKeySet keys, const at::Tensor& weight, const at::Tensor& indices, c10::SymInt padding_idx,
                     bool scale_grad_by_freq, bool sparse) {
  const Consumption use(weight, Role::table, /*transposed=*/false);
  if (!use) {
    return at::_ops::embedding::redispatch(keys & kBelow, weight, indices, std::move(padding_idx), scale_grad_by_freq,
                                           sparse);
  }
  return use.leave(at::_ops::embedding::redispatch(keys & kBelow, weight, use.enter(indices), std::move(padding_idx),
                                                   scale_grad_by_freq, sparse));
}

// What Embedding with max_norm does to the table before it looks up.
at::Tensor& embedding_renorm_(DispatchKeySet keys, at::Tensor& weight, const at::Tensor& indices, double max_norm,
                              double norm_type) {
  const Consumption use(weight, Role::table, /*transposed=*/false);
  const at::Tensor entered = use ? use.enter(indices) : indices;
  return at::_ops::embedding_renorm_::redispatch(keys & kBelow, weight, entered, max_norm, norm_type);
}

at::Tensor layer_norm(DispatchKeySet keys, const at::Tensor& input, c10::SymIntArrayRef normalized_shape,
                      const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias, double eps,
                      bool cudnn_enable) {
  if (const auto dtype = detail::cast_beside(input, tensor_or_undefined(weight))) {
    return layer_norm(keys, input.to(*dtype), normalized_shape, weight, bias, eps, cudnn_enable);
  }
  const Consumption use(tensor_or_undefined(weight), Role::norm, /*transposed=*/false);
  const at::Tensor entered = use ? use.enter(input) : input;
  const c10::impl::ExcludeDispatchKeyGuard unmarked(kAboveKey);
  at::Tensor y =
      at::_ops::layer_norm::redispatch(keys & kBelow, entered, normalized_shape, weight, bias, eps, cudnn_enable);
  return use ? use.leave(std::move(y)) : y;
}

at::Tensor rms_norm(DispatchKeySet keys, const at::Tensor& input, c10::SymIntArrayRef normalized_shape,
                    const std::optional<at::Tensor>& weight, std::optional<double> eps) {
  if (const auto dtype = detail::cast_beside(input, tensor_or_undefined(weight))) {
    return rms_norm(keys, input.to(*dtype), normalized_shape, weight, eps);
  }
  const Consumption use(tensor_or_undefined(weight), Role::norm, /*transposed=*/false);
  const at::Tensor entered = use ? use.enter(input) : input;
  const c10::impl::ExcludeDispatchKeyGuard unmarked(kAboveKey);
  at::Tensor y = at::_ops::rms_norm::redispatch(keys & kBelow, entered, normalized_shape, weight, eps);
  return use ? use.leave(std::move(y)) : y;
}

at::Tensor group_norm(DispatchKeySet keys, const at::Tensor& input, int64_t num_groups,
                      const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias, double eps,
                      bool cudnn_enabled) {
  if (const auto dtype = detail::cast_beside(input, tensor_or_undefined(weight))) {
    return group_norm(keys, input.to(*dtype), num_groups, weight, bias, eps, cudnn_enabled);
  }
  const Consumption use(tensor_or_undefined(weight), Role::norm, /*transposed=*/false);
  const at::Tensor entered = use ? use.enter(input) : input;
  const c10::impl::ExcludeDispatchKeyGuard unmarked(kAboveKey);
  at::Tensor y = at::_ops::group_norm::redispatch(keys & kBelow, entered, num_groups, weight, bias, eps, cudnn_enabled);
  return use ? use.leave(std::move(y)) : y;
}

bool above_key_is_free() {
  return !c10::Dispatcher::singleton().hasBackendFallbackForDispatchKey(kAboveKey);
}

// What the transpose of a matrix is marked with: it is consumed as the matrix, and its own transpose as nothing.
UsePtr transpose_use(const UseLayouts& layouts) {
  auto transposed = std::make_shared<UseLayouts>(layouts.mesh);
  transposed->of(Role::matrix) = layouts.of(Role::matrix);
  transposed->is_transpose = true;
  return std::make_shared<ParameterUse>(ParameterUse{.layouts = std::move(transposed), .gather = nullptr});
}

}  // namespace

namespace detail {

AskedLayout::AskedLayout(Placements placements) : given_(std::move(placements)) {
  for (int64_t ndim = 0; ndim < kKnownDims; ++ndim) {
    bool fits = true;
    for (const Placement& p : given_) fits = fits && (!p.is_shard() || (p.dim() < ndim && p.dim() >= -ndim));
    if (fits) resolved_[size_t(ndim)] = checked_placements("layout", given_, ndim, int64_t(given_.size()));
  }
}

const Placements& AskedLayout::resolve(int64_t ndim) const {
  thread_local Placements resolved;
  resolved = checked_placements("layout asked by a parameter", given_, ndim, int64_t(given_.size()));
  return resolved;
}

void set_role(const at::Tensor& parameter, const DeviceMesh& mesh, Role role, RoleLayouts layouts) {
  const UsePtr old = dtensor_meta(parameter)->use;
  auto asked = old != nullptr && old->layouts != nullptr ? std::make_shared<UseLayouts>(*old->layouts)
                                                         : std::make_shared<UseLayouts>(mesh);
  asked->of(role) = std::move(layouts);
  if (asked->of(Role::matrix).has_value()) asked->transposed = transpose_use(*asked);
  ParameterUse use = old != nullptr ? *old : ParameterUse{};
  use.layouts = std::move(asked);
  set_use(parameter, std::make_shared<ParameterUse>(std::move(use)));
}

const RoleLayouts* role_of(const at::Tensor& parameter, Role role) {
  const UseLayouts* layouts = layouts_of(parameter);
  return layouts != nullptr && layouts->of(role).has_value() ? &*layouts->of(role) : nullptr;
}

}  // namespace detail

TORCH_LIBRARY_IMPL(_, DeferredInit, m) {
  if (!above_key_is_free()) {
    raise<c10::Error>({"serried", "another library has registered a fallback for the dispatch key DeferredInit",
                       "load only one library that uses this key in a process"});
  }
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, DeferredInit, m) {
  m.impl("t", t);
  m.impl("transpose.int", transpose);
  m.impl("mm", mm);
  m.impl("addmm", addmm);
  m.impl("matmul", matmul);
  m.impl("linear", linear);
  m.impl("embedding", embedding);
  m.impl("embedding_renorm_", embedding_renorm_);
  m.impl("layer_norm", layer_norm);
  m.impl("rms_norm", rms_norm);
  m.impl("group_norm", group_norm);
}

}  // namespace serried
