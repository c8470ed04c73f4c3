// Between parameters that are DTensors and the plain memory of buckets.
#include "serried/parallel/ddp/dtensor_parameters.h"

#include <algorithm>

#include "serried/base/error.h"
#include "serried/tensor/dtensor.h"
#include "serried/tensor/making/placing.h"

namespace serried::detail {
namespace {

bool share_other_ranks(const DeviceMesh& a, const DeviceMesh& b) {
  if (a.root_group() != b.root_group()) return false;
  const auto is_shared = [&](int64_t rank) {
    return rank != a.get_rank() && std::count(b.rank_list().begin(), b.rank_list().end(), rank) != 0;
  };
  return std::any_of(a.rank_list().begin(), a.rank_list().end(), is_shared);
}

}  // namespace

std::vector<ManagedParameter> parts_of(std::vector<ManagedParameter> parameters) {
  for (ManagedParameter& parameter : parameters) parameter.tensor = part_of(parameter.tensor);
  return parameters;
}

void check_apart(const std::vector<ManagedParameter>& parameters, const DeviceMesh& mesh) {
  for (const ManagedParameter& parameter : parameters) {
    const DTensorMeta* meta = dtensor_meta(parameter.tensor);
    if (meta == nullptr || !share_other_ranks(meta->spec->mesh, mesh)) continue;
    raise<c10::ValueError>({"DistributedDataParallel",
                            c10::str(parameter.name, " is ", meta->spec->to_string(), ", distributed over ranks of ",
                                     mesh.to_string(), " that would average it"),
                            "distribute parameters over another axis than the one given here, such as mesh[\"tp\"]"});
  }
}

at::Tensor gradient_part(const at::Tensor& grad, const at::Tensor& parameter) {
  const DTensorMeta* meta = dtensor_meta(parameter);
  if (meta == nullptr) return grad;
  return part_of(DTensor(grad).redistribute(gradient_placements(meta->spec->placements)));
}

at::Tensor as_gradient(const at::Tensor& part, const at::Tensor& parameter) {
  const DTensorMeta* meta = dtensor_meta(parameter);
  if (meta == nullptr) return part;
  const Spec& spec = *meta->spec;
  return wrap(
      part, intern_spec(spec.mesh, gradient_placements(spec.placements), spec.sizes, spec.strides, part.scalar_type()));
}

}  // namespace serried::detail
