// Unscales gradients part by part and lets every rank know whether any of them was not finite.
#include "serried/tensor/handlers/loss_scaling.h"

#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/zeros_like.h>

#include "serried/tensor/dispatch/copied_view.h"
#include "serried/tensor/making/like.h"
#include "serried/tensor/meta.h"
#include "serried/tensor/redistribute/redistribute.h"

namespace serried::detail {
namespace {

using torch::jit::Stack;

at::Tensor local_or_self(const at::Tensor& t) {
  const DTensorMeta* meta = dtensor_meta(t);
  return meta == nullptr ? t : meta->local;
}

struct Gradient {
  const DTensorMeta* meta;
  at::Tensor whole;  // differs from the part the tensor holds where that was a pending sum
};

void write_back(const Gradient& gradient) {
  if (gradient.meta == nullptr || gradient.whole.is_same(gradient.meta->local)) return;
  const Spec& spec = *gradient.meta->spec;
  const SpecPtr from = with_placements(spec, without_partial(spec.placements));
  gradient.meta->local.copy_(redistribute_local(gradient.whole, *from, spec.placements));
}

// The largest of all ranks of the mesh.
at::Tensor largest(const at::Tensor& local, const DeviceMesh& mesh) {
  const Placements pending(size_t(mesh.ndim()), Partial(ReduceKind::max));
  const SpecPtr spec = spec_of_result(local, mesh, pending, local.sizes());
  return redistribute_local(local, *spec, Placements(size_t(mesh.ndim())));
}

}  // namespace

bool check_and_unscale(const c10::OperatorHandle&, Stack& stack) {
  const auto arguments = torch::jit::last(stack, 3);
  const at::Tensor found_inf = arguments[1].toTensor();
  const at::Tensor inv_scale = local_or_self(arguments[2].toTensor());
  const DTensorMeta* first = nullptr;
  std::vector<Gradient> gradients;
  std::vector<at::Tensor> parts;
  for (const at::Tensor& t : arguments[0].toTensorVector()) {
    const DTensorMeta* meta = dtensor_meta(t);
    if (first == nullptr) first = meta;
    if (meta != nullptr) begin_write("_amp_foreach_non_finite_check_and_unscale_", "self", *meta);
    // A pending sum says nothing about the value: it is checked once it is whole.
    at::Tensor whole =
        meta == nullptr ? t : redistribute_local(meta->local, *meta->spec, without_partial(meta->spec->placements));
    if (whole.numel() > 0) parts.push_back(whole);
    gradients.push_back({meta, std::move(whole)});
  }
  if (first == nullptr) return false;
  at::Tensor found = at::zeros_like(local_or_self(found_inf));
  if (!parts.empty()) at::_amp_foreach_non_finite_check_and_unscale_(parts, found, inv_scale);
  for (const Gradient& gradient : gradients) write_back(gradient);
  found = largest(found, first->spec->mesh);
  at::Tensor target = local_or_self(found_inf);
  target.copy_(at::maximum(target, found));
  torch::jit::drop(stack, 3);
  return true;
}

}  // namespace serried::detail
