// Softmax along a dim that is cut: ranks put their largest values and their sums together, and the result stays cut.
#include <ATen/ATen.h>

#include <limits>
#include <optional>

#include "serried/tensor/dispatch/handlers.h"
#include "serried/tensor/dispatch/local_only.h"
#include "serried/tensor/handlers/part_reduction.h"
#include "serried/tensor/redistribute/redistribute.h"

namespace serried {
namespace {

using detail::accumulated;
using detail::LocalOnly;
using detail::OpCall;
using detail::PartReduction;
using torch::jit::Stack;

// The dim that `call` is a softmax along, where `placements` cut it over several ranks: decided by what all ranks know.
std::optional<int64_t> cut_dim(const OpCall& call, const DeviceMesh& mesh, const Placements& placements) {
  const at::Tensor& first = call.argument(0).toTensor();
  const int64_t dim = spmd::from_front(call.integer("dim"), first.dim());
  if (call.has_out() || !first.is_floating_point() || dim < 0 || dim >= first.dim()) return std::nullopt;
  for (int64_t axis = 0; axis < mesh.ndim(); ++axis) {
    if (mesh.size(axis) > 1 && placements[size_t(axis)].is_shard(dim) && first.size(dim) > 0) return dim;
  }
  return std::nullopt;
}

at::Tensor largest_along(const at::Tensor& x, int64_t dim) {
  if (x.size(dim) > 0) return x.amax(dim, /*keepdim=*/true);
  Sizes sizes = x.sizes().vec();
  sizes[size_t(dim)] = 1;
  return at::full(sizes, -std::numeric_limits<double>::infinity(), x.options());
}

at::Tensor as_cut(at::Tensor part, const DeviceMesh& mesh, const Placements& placements, c10::IntArrayRef sizes) {
  part = part.contiguous();
  SpecPtr spec = spec_of_result(part, mesh, placements, sizes);
  return wrap(std::move(part), std::move(spec));
}

// The softmax of this rank's part, made that of the whole: the sum that a row was divided by is read off its largest
// element, exp(0) over that sum. Two all-reduces of one number per row; nothing but the result is as large as the part.
at::Tensor softmax_part(const PartReduction& parts, const at::Tensor& x, int64_t dim, bool is_log) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const at::Tensor largest_here = largest_along(x, dim);
  const at::Tensor largest = parts.reduced(largest_here, ReduceKind::max);
  at::Tensor y = is_log ? at::_log_softmax(x, dim, false) : at::_softmax(x, dim, false);
  const at::Tensor peak = largest_along(y, dim);
  // NaN in rows that have nothing here, though other ranks may have something.
  const at::Tensor nothing = largest_here.eq(-kInfinity);
  const at::Tensor log_sum = (is_log ? peak : peak.log()).neg().masked_fill(nothing, 0) + (largest_here - largest);
  const at::Tensor away = log_sum - parts.reduced(log_sum.exp(), ReduceKind::sum).log();
  y.masked_fill_(nothing, is_log ? -kInfinity : 0);
  return is_log ? y.add_(away) : y.mul_(away.exp());
}

bool softmax(const c10::OperatorHandle& op, Stack& stack, bool is_log) {
  const OpCall call(op, stack);
  const DTensorMeta* meta = dtensor_meta(call.argument(0).toTensor());
  if (meta == nullptr) return false;
  const Spec& spec = *meta->spec;
  const Placements placements = without_partial(spec.placements);
  const std::optional<int64_t> dim = cut_dim(call, spec.mesh, placements);
  if (!dim) return false;
  at::Tensor result;
  {
    const LocalOnly guard;
    const PartReduction parts(*meta, {*dim});
    const at::Tensor part = softmax_part(parts, parts.local().to(accumulated(spec.dtype)), *dim, is_log);
    const at::ScalarType dtype = call.flag("half_to_float") ? at::kFloat : spec.dtype;
    result = as_cut(part.to(dtype), spec.mesh, placements, spec.sizes);
  }
  return detail::finish(op, stack, {result});
}

// Gradient and output lie alike: as the output is cut, else as the gradient is.
Placements common_cut(const Placements& gradient, const Placements& output) {
  Placements common(output.size());
  for (size_t axis = 0; axis < common.size(); ++axis) {
    if (gradient[axis].is_shard()) common[axis] = gradient[axis];
    if (output[axis].is_shard()) common[axis] = output[axis];
  }
  return common;
}

// Inside backward a plain tensor counts as replicated.
at::Tensor as_replicated(const at::Tensor& t, const DeviceMesh& mesh) {
  if (dtensor_meta(t) != nullptr) return t;
  return wrap(t, spec_of_result(t, mesh, Placements(size_t(mesh.ndim())), t.sizes()));
}

// One all-reduce of one number per row.
bool softmax_backward(const c10::OperatorHandle& op, Stack& stack, bool is_log) {
  const OpCall call(op, stack);
  const DTensorMeta* first = dtensor_meta(call.argument(0).toTensor());
  if (first == nullptr) first = dtensor_meta(call.argument(1).toTensor());
  if (first == nullptr) return false;
  const DeviceMesh mesh = first->spec->mesh;
  const at::Tensor gradient = as_replicated(call.argument(0).toTensor(), mesh);
  const at::Tensor output = as_replicated(call.argument(1).toTensor(), mesh);
  const DTensorMeta& grad_meta = *dtensor_meta(gradient);
  const DTensorMeta& output_meta = *dtensor_meta(output);
  const Placements placements = common_cut(grad_meta.spec->placements, output_meta.spec->placements);
  const std::optional<int64_t> dim = cut_dim(call, mesh, placements);
  if (!dim || gradient.sizes() != output.sizes()) return false;
  at::Tensor result;
  {
    const LocalOnly guard;
    const at::ScalarType wide = accumulated(output.scalar_type());
    const at::Tensor placed = as_cut(detail::local_as(output_meta, placements), mesh, placements, output.sizes());
    const PartReduction parts(*dtensor_meta(placed), {*dim});
    const at::Tensor y = parts.local().to(wide);
    const at::Tensor g = detail::local_as(grad_meta, placements).to(wide);
    const at::Tensor sum = parts.reduced((is_log ? g : g * y).sum(*dim, /*keepdim=*/true), ReduceKind::sum);
    result = is_log ? y.exp().mul_(sum.neg()).add_(g) : (g - sum).mul_(y);
    const auto dtype = static_cast<at::ScalarType>(call.integer("input_dtype", int64_t(output.scalar_type())));
    result = as_cut(result.to(dtype), mesh, placements, output.sizes());
  }
  return detail::finish(op, stack, {result});
}

bool run_softmax(const c10::OperatorHandle& op, Stack& stack) {
  return softmax(op, stack, /*is_log=*/false);
}
bool run_log_softmax(const c10::OperatorHandle& op, Stack& stack) {
  return softmax(op, stack, /*is_log=*/true);
}
bool run_softmax_backward(const c10::OperatorHandle& op, Stack& stack) {
  return softmax_backward(op, stack, /*is_log=*/false);
}
bool run_log_softmax_backward(const c10::OperatorHandle& op, Stack& stack) {
  return softmax_backward(op, stack, /*is_log=*/true);
}

}  // namespace

std::vector<HandlerEntry> softmax_handlers() {
  return {
      {"aten::_log_softmax", run_log_softmax},
      {"aten::_log_softmax_backward_data", run_log_softmax_backward},
      {"aten::_softmax", run_softmax},
      {"aten::_softmax_backward_data", run_softmax_backward},
  };
}

}  // namespace serried
