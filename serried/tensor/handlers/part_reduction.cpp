// Bookkeeping of reductions that are done part by part.
#include "serried/tensor/handlers/part_reduction.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "serried/tensor/dispatch/handlers.h"
#include "serried/tensor/making/like.h"
#include "serried/tensor/redistribute/redistribute.h"

namespace serried::detail {
namespace {

bool contains(const std::vector<int64_t>& dims, int64_t dim) {
  return std::find(dims.begin(), dims.end(), dim) != dims.end();
}

}  // namespace

PartReduction::PartReduction(const DTensorMeta& meta, std::vector<int64_t> dims)
    : mesh_(meta.spec->mesh),
      placements_(without_partial(meta.spec->placements)),
      sizes_(meta.spec->sizes),
      dims_(std::move(dims)),
      local_(local_as(meta, placements_)) {
  for (const int64_t dim : dims_) {
    local_count_ *= local_.size(dim);
    count_ *= sizes_[size_t(dim)];
    sizes_[size_t(dim)] = 1;
  }
}

bool PartReduction::is_needed(const DTensorMeta& meta, const std::vector<int64_t>& dims) {
  const Placements& placements = meta.spec->placements;
  return std::any_of(placements.begin(), placements.end(),
                     [&](const Placement& p) { return p.is_shard() && contains(dims, p.dim()); });
}

Placements PartReduction::placements(ReduceKind kind) const {
  Placements result = placements_;
  for (Placement& placement : result) {
    if (placement.is_shard() && contains(dims_, placement.dim())) placement = Partial(kind);
  }
  return result;
}

at::Tensor PartReduction::wrapped(const at::Tensor& part, const Placements& placements, bool keepdim) const {
  if (keepdim) return wrap(part, spec_of_result(part, mesh_, placements, sizes_));
  c10::DimVector sizes;
  Sizes local_sizes;
  std::vector<int64_t> place(sizes_.size(), -1);
  for (size_t d = 0; d < sizes_.size(); ++d) {
    if (contains(dims_, int64_t(d))) continue;
    place[d] = int64_t(sizes.size());
    sizes.push_back(sizes_[d]);
    local_sizes.push_back(part.size(int64_t(d)));
  }
  Placements moved = placements;
  for (Placement& p : moved) {
    if (p.is_shard()) p = p.along(place[size_t(p.dim())]);
  }
  const at::Tensor local = part.reshape(local_sizes);
  return wrap(local, spec_of_result(local, mesh_, moved, sizes));
}

at::Tensor PartReduction::none(at::ScalarType dtype) const {
  Sizes sizes = local_.sizes().vec();
  for (const int64_t dim : dims_) sizes[size_t(dim)] = 1;
  return at::zeros(sizes, local_.options().dtype(dtype));
}

at::Tensor PartReduction::reduced(const at::Tensor& part, ReduceKind kind) const {
  const SpecPtr from = spec_of_result(part, mesh_, placements(kind), sizes_);
  return redistribute_local(part, *from, without_partial(from->placements));
}

at::Tensor PartReduction::of_first(const at::Tensor& part) const {
  const bool is_first = !identity_here(placements(ReduceKind::sum), mesh_.position()).has_value();
  return reduced(is_first ? part : at::zeros_like(part), ReduceKind::sum);
}

at::Tensor PartReduction::as_dtensor(const at::Tensor& part, bool keepdim) const {
  return wrapped(part, without_partial(placements(ReduceKind::sum)), keepdim);
}

}  // namespace serried::detail
