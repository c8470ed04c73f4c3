// The checks and moves of local_map.
#include "serried/tensor/local_map.h"

#include <ATen/ATen.h>

#include "serried/base/error.h"
#include "serried/comm/collectives/watch.h"
#include "serried/tensor/dtensor.h"
#include "serried/tensor/making/unchecked.h"
#include "serried/tensor/making/placing.h"
#include "serried/tensor/meta.h"

namespace serried::detail {
namespace {

constexpr const char* kLocalMap = "local_map";

void check_count(const char* name, const std::vector<Placements>& placements, size_t count) {
  if (placements.empty() || placements.size() == count) return;
  raise<c10::ValueError>({kLocalMap, c10::str(name, " has ", placements.size(), " entries for ", count, " arguments"),
                          "pass one per argument, {} for one that is no DTensor"});
}

bool has_shard(const Placements& placements) {
  for (const Placement& placement : placements) {
    if (placement.is_shard()) return true;
  }
  return false;
}

}  // namespace

void LocalMapCall::see(const at::Tensor& t) {
  const DTensorMeta* meta = t.defined() ? dtensor_meta(t) : nullptr;
  if (meta != nullptr && !mesh_.has_value()) mesh_ = meta->spec->mesh;
}

void LocalMapCall::see(const std::vector<at::Tensor>& tensors) {
  for (const at::Tensor& t : tensors) see(t);
}

bool LocalMapCall::is_distributed() {
  if (!mesh_.has_value()) return false;
  if (options_.mesh.has_value()) mesh_ = options_.mesh;
  check_count("in_placements", options_.in_placements, count_);
  check_count("in_grad_placements", options_.in_grad_placements, count_);
  return true;
}

void LocalMapCall::no_tensor(const char* what, const std::vector<Placements>& placements, size_t index) {
  if (index >= placements.size() || placements[index].empty()) return;
  raise<c10::ValueError>(
      {kLocalMap,
       c10::str(what, " ", index, " is no DTensor, but has placements \"", to_string(placements[index]), "\""),
       "pass {} for it, or make it one with distribute_tensor or DTensor::from_local"});
}

at::Tensor LocalMapCall::local_of(const at::Tensor& t, size_t index) const {
  if (!t.defined() || !is_dtensor(t)) {
    no_tensor("argument", options_.in_placements, index);
    return t;
  }
  DTensor d(t);
  if (!(d.device_mesh() == *mesh_)) {
    raise<c10::ValueError>(
        {kLocalMap,
         c10::str("argument ", index, " is on ", d.device_mesh().to_string(), ", not on ", mesh_->to_string()),
         "redistribute it to the mesh first: d.redistribute(mesh, placements)"});
  }
  const bool has_grad = index < options_.in_grad_placements.size() && !options_.in_grad_placements[index].empty();
  ToLocalOptions to_local;
  if (has_grad) to_local.grad_placements = options_.in_grad_placements[index];
  if (options_.in_placements.empty()) return d.to_local(to_local);
  if (options_.in_placements[index].empty()) {
    raise<c10::ValueError>({kLocalMap, c10::str("argument ", index, " is a DTensor, but its placements are {}"),
                            c10::str("pass its placements: \"", to_string(d.placements()), "\"")});
  }
  const Placements wanted =
      resolved_placements(kLocalMap, options_.in_placements[index], d.dim(), *mesh_, d.scalar_type());
  if (d.placements() == wanted) return d.to_local(to_local);
  if (options_.redistribute_inputs) return d.redistribute(wanted).to_local(to_local);
  raise<c10::ValueError>(
      {kLocalMap,
       c10::str("argument ", index, " is placed \"", to_string(d.placements()), "\", not \"", to_string(wanted), "\""),
       "redistribute it first, or pass {.redistribute_inputs = true}"});
}

at::Tensor LocalMapCall::input(const at::Tensor& t) {
  return local_of(t, next_++);
}

std::vector<at::Tensor> LocalMapCall::input(const std::vector<at::Tensor>& tensors) {
  const size_t index = next_++;
  std::vector<at::Tensor> local;
  for (const at::Tensor& t : tensors) local.push_back(local_of(t, index));
  return local;
}

std::vector<at::Tensor> LocalMapCall::output(const std::vector<at::Tensor>& tensors) {
  begin_results(tensors.size());
  std::vector<at::Tensor> results;
  for (const at::Tensor& t : tensors) results.push_back(wrapped(t));
  return results;
}

void LocalMapCall::begin_results(size_t count) {
  next_ = 0;
  if (options_.out_placements.size() == count) return;
  raise<c10::ValueError>({kLocalMap,
                          c10::str("the function gave ", count, " results, out_placements has ",
                                   options_.out_placements.size(), " entries"),
                          "pass one per result, {} for one that is no tensor"});
}

at::Tensor LocalMapCall::wrapped(const at::Tensor& t) {
  const size_t index = next_++;
  const Placements& wanted = options_.out_placements[index];
  if (!t.defined()) return t;
  if (is_dtensor(t)) {
    raise<c10::ValueError>({kLocalMap,
                            c10::str("result ", index, " is a DTensor: ", dtensor_meta(t)->spec->to_string()),
                            "return this rank's part, a plain tensor"});
  }
  if (wanted.empty()) {
    raise<c10::ValueError>(
        {kLocalMap, c10::str("result ", index, " is ", watch::describe_tensor(t), ", but its placements are {}"),
         "pass placements for it: one per axis of the mesh"});
  }
  const Placements placed = resolved_placements(kLocalMap, wanted, t.dim(), *mesh_, t.scalar_type());
  if (!has_shard(placed)) return DTensor::from_local(t, *mesh_, placed);
  const at::Tensor part = t.contiguous();
  const c10::DimVector sizes = agreed_sizes(kLocalMap, part, *mesh_, placed, std::nullopt);
  const SpecPtr spec = spec_of_result(part, *mesh_, placed, sizes);
  return DTensor::from_local(
      part, *mesh_, placed,
      {.shape = Sizes(sizes.begin(), sizes.end()), .stride = Sizes(spec->strides.begin(), spec->strides.end())});
}

}  // namespace serried::detail
