// DTensor::from_local: local parts become one tensor.
#include "serried/tensor/making/unchecked.h"

#include <ATen/ATen.h>

#include "serried/base/error.h"
#include "serried/comm/collectives/collectives.h"
#include "serried/comm/collectives/watch.h"
#include "serried/tape/tape.h"
#include "serried/tensor/dtensor.h"
#include "serried/tensor/making/gradient.h"
#include "serried/tensor/making/placing.h"
#include "serried/tensor/meta.h"
#include "serried/tensor/spec.h"

namespace serried {
namespace {

constexpr const char* kFromLocal = "from_local";

void check_arguments(const at::Tensor& local, const FromLocalOptions& options) {
  if (!local.defined()) {
    raise<c10::ValueError>(
        {kFromLocal, "the local tensor is undefined", "pass at::empty({0}) for a part without elements"});
  }
  if (is_dtensor(local)) {
    raise<c10::ValueError>({kFromLocal,
                            "the local tensor is already a DTensor: " + dtensor_meta(local)->spec->to_string(),
                            "pass d.to_local(), or use d.redistribute(placements)"});
  }
  if (options.shape.has_value() != options.stride.has_value()) {
    raise<c10::ValueError>(
        {kFromLocal, options.shape.has_value() ? "shape is given without stride" : "stride is given without shape",
         "pass both, or none where every rank's part is as large as this one"});
  }
  if (options.shape.has_value() && options.shape->size() != options.stride->size()) {
    raise<c10::ValueError>({kFromLocal,
                            c10::str("shape ", detail::sizes_text(*options.shape), " and stride ",
                                     detail::sizes_text(*options.stride), " have different lengths"),
                            "pass one stride per dim"});
  }
}

void check_sizes(const at::Tensor& local, const Sizes& shape, const DeviceMesh& mesh, const Placements& placements) {
  const auto expected = int64_t(shape.size()) == local.dim()
                            ? std::optional(local_sizes(shape, placements, mesh.position()))
                            : std::nullopt;
  if (expected.has_value() && local.sizes() == *expected) return;
  const std::string place =
      c10::str("\"", to_string(placements), "\" of ", detail::sizes_text(shape), " on ", mesh.to_string());
  raise<c10::ValueError>({kFromLocal,
                          expected.has_value()
                              ? c10::str("the local tensor is ", watch::describe_tensor(local), ", but ", place,
                                         " gives this rank ", detail::sizes_text(*expected))
                              : c10::str("the local tensor is ", watch::describe_tensor(local), ", but shape ",
                                         detail::sizes_text(shape), " has ", shape.size(), " dims"),
                          "pass the global shape whose parts are cut like Shard, or parts cut so"});
}

c10::DimVector multiplied_sizes(const at::Tensor& local, const DeviceMesh& mesh, const Placements& placements) {
  c10::DimVector sizes(local.sizes().begin(), local.sizes().end());
  for (int64_t dim = 0; dim < local.dim(); ++dim) sizes[size_t(dim)] *= num_shards(dim, placements, mesh.shape());
  return sizes;
}

// An alias of `local` where it lies as the whole does: row-major, or in the order of the strides given. Its own order
// may not count, since a part of one row has none, and all ranks must come to the same strides of the whole.
at::Tensor plain_part(const at::Tensor& local, const std::optional<Sizes>& stride) {
  const at::Tensor part = local.resolve_conj().resolve_neg();
  if (!stride.has_value() || int64_t(stride->size()) != part.dim()) return part.contiguous();
  const c10::DimVector due = dense_strides(part.sizes(), *stride);
  if (part.strides() == due || part.numel() == 0) return part;
  if (due == serried::contiguous_strides(part.sizes())) return part.contiguous();
  return at::empty_strided(part.sizes(), due, part.options()).copy_(part);
}

at::Tensor broadcast_replicated(const at::Tensor& local, const DeviceMesh& mesh, const Placements& placements) {
  const at::NoGradGuard no_grad;
  at::Tensor data = local;
  for (int64_t axis = 0; axis < mesh.ndim(); ++axis) {
    if (placements[size_t(axis)].is_replicate()) data = broadcast(data, mesh.get_group(axis));
  }
  return data;
}

void check_gradient(const at::Tensor& local, const Placements& placements) {
  if (!detail::wants_gradient(local)) return;
  for (const Placement& placement : placements) {
    if (!placement.is_partial() || placement.is_partial(ReduceKind::sum) || placement.is_partial(ReduceKind::avg)) {
      continue;
    }
    raise<c10::NotImplementedError>(
        {kFromLocal, c10::str("the gradient through ", to_string(placement), " does not go to all ranks alike"),
         "pass local.detach(), or {.grad_placements = ...} if you know what comes back"});
  }
}

constexpr int64_t kMaxDims = 64;  // LibTorch's own limit

struct RankPart {
  c10::ScalarType dtype;
  bool requires_grad;
  c10::DimVector sizes;

  std::string to_string() const { return watch::dtype_name(dtype) + detail::sizes_text(sizes); }
};

std::vector<RankPart> parts_of_all(const at::Tensor& local, const DeviceMesh& mesh) {
  const tape::Pause only_checks;
  at::Tensor mine = at::zeros({1, 3 + kMaxDims}, at::kLong);
  int64_t* row = mine.data_ptr<int64_t>();
  row[0] = int64_t(local.scalar_type());
  row[1] = local.requires_grad() ? 1 : 0;
  row[2] = local.dim();
  std::copy(local.sizes().begin(), local.sizes().end(), row + 3);
  const at::Tensor all = all_gather(mine, detail::whole_group(mesh));
  std::vector<RankPart> parts;
  for (int64_t i = 0; i < mesh.size(); ++i) {
    const int64_t* r = all.data_ptr<int64_t>() + i * (3 + kMaxDims);
    parts.push_back({c10::ScalarType(r[0]), r[1] != 0, c10::DimVector(r + 3, r + 3 + r[2])});
  }
  return parts;
}

std::string rank_text(const DeviceMesh& mesh, size_t index) {
  return "rank " + std::to_string(mesh.rank_list()[index]);
}

void check_alike(std::string_view where, const std::vector<RankPart>& parts, const DeviceMesh& mesh) {
  for (size_t i = 1; i < parts.size(); ++i) {
    const RankPart& first = parts[0];
    const RankPart& other = parts[i];
    if (other.dtype != first.dtype || other.sizes.size() != first.sizes.size()) {
      raise<c10::ValueError>({where,
                              c10::str("the parts differ: ", rank_text(mesh, 0), " has ", first.to_string(), ", ",
                                       rank_text(mesh, i), " has ", other.to_string()),
                              "pass the same dtype and number of dims on every rank"});
    }
    if (other.requires_grad == first.requires_grad) continue;
    raise<c10::ValueError>(
        {where,
         c10::str("requires_grad differs: ", first.requires_grad ? "true" : "false", " on ", rank_text(mesh, 0), ", ",
                  other.requires_grad ? "true" : "false", " on ", rank_text(mesh, i)),
         "set it alike on every rank"});
  }
}

// The whole dim: what the ranks hold that differ in the axes that cut it only.
int64_t added_size(const std::vector<RankPart>& parts, const DeviceMesh& mesh, const Placements& placements,
                   int64_t dim) {
  int64_t total = 0;
  for (size_t i = 0; i < parts.size(); ++i) {
    const c10::DimVector coordinate = coordinate_of(int64_t(i), mesh.shape());
    bool counts = true;
    for (size_t axis = 0; axis < placements.size(); ++axis) {
      counts = counts && (placements[axis].is_shard(dim) || coordinate[axis] == 0);
    }
    if (counts) total += parts[i].sizes[size_t(dim)];
  }
  return total;
}

}  // namespace

namespace detail {

at::Tensor from_local_unchecked(const at::Tensor& local, const at::Tensor& data, const SpecPtr& spec,
                                const Placements& grad_placements) {
  at::Tensor result = wrap(data.requires_grad() ? data.detach() : data, spec);
  if (data.is_same(local) && !local.is_inference() && !result.is_inference()) {
    // Writing to either is seen by what autograd saved of the other.
    result.unsafeGetTensorImpl()->set_version_counter(local.unsafeGetTensorImpl()->version_counter());
  }
  if (!wants_gradient(local)) return result;
  // A rank's part of an average weighs 1 / ranks.
  double weight = 1;
  for (size_t axis = 0; axis < spec->placements.size(); ++axis) {
    if (spec->placements[axis].is_partial(ReduceKind::avg)) weight /= double(spec->mesh.size(int64_t(axis)));
  }
  record_gradient("FromLocalBackward", local, result, [grad_placements, weight](const at::Tensor& grad) {
    at::Tensor part_grad = DTensor(grad).redistribute(grad_placements).to_local();
    return weight == 1 ? part_grad : part_grad * weight;
  });
  return result;
}

c10::DimVector agreed_sizes(std::string_view where, const at::Tensor& local, const DeviceMesh& mesh,
                            const Placements& placements, const std::optional<Sizes>& given) {
  const std::vector<RankPart> parts = parts_of_all(local, mesh);
  check_alike(where, parts, mesh);
  c10::DimVector sizes;
  if (given.has_value()) {
    sizes.assign(given->begin(), given->end());
  } else {
    for (int64_t dim = 0; dim < local.dim(); ++dim) sizes.push_back(added_size(parts, mesh, placements, dim));
  }
  for (size_t i = 0; i < parts.size(); ++i) {
    const c10::DimVector coordinate = coordinate_of(int64_t(i), mesh.shape());
    const c10::DimVector expected =
        sizes.size() == parts[i].sizes.size() ? local_sizes(sizes, placements, {mesh.shape(), coordinate}) : sizes;
    if (parts[i].sizes == expected) continue;
    raise<c10::ValueError>({where,
                            c10::str("the parts do not make \"", to_string(placements), "\" of ", sizes_text(sizes),
                                     " on ", mesh.to_string(), ": ", rank_text(mesh, i), " has ",
                                     sizes_text(parts[i].sizes), " where ", sizes_text(expected), " is due"),
                            "cut the parts like Shard: ceil(size / ranks) each, the last ranks less or nothing"});
  }
  return sizes;
}

}  // namespace detail

DTensor DTensor::from_local(const at::Tensor& local, const DeviceMesh& mesh, const Placements& placements,
                            FromLocalOptions options) {
  check_arguments(local, options);
  detail::check_in_mesh(kFromLocal, mesh);
  const Placements placed = detail::resolved_placements(kFromLocal, placements, local.dim(), mesh, local.scalar_type());
  const Placements grad_placed =
      options.grad_placements.has_value()
          ? detail::resolved_placements(kFromLocal, *options.grad_placements, local.dim(), mesh, local.scalar_type())
          : detail::gradient_placements(placed);
  if (!options.grad_placements.has_value()) check_gradient(local, placed);

  const at::Tensor part = plain_part(local, options.stride);
  at::Tensor data = part;
  c10::DimVector sizes;
  if (options.run_check) {
    sizes = detail::agreed_sizes(kFromLocal, part, mesh, placed, options.shape);
    data = broadcast_replicated(part, mesh, placed);
  } else if (options.shape.has_value()) {
    check_sizes(part, *options.shape, mesh, placed);
    sizes.assign(options.shape->begin(), options.shape->end());
  } else {
    sizes = multiplied_sizes(part, mesh, placed);
  }
  const SpecPtr spec = options.stride.has_value()
                           ? intern_spec(mesh, placed, sizes, *options.stride, part.scalar_type())
                           : spec_of_result(part, mesh, placed, sizes);
  return DTensor(detail::from_local_unchecked(part, data, spec, grad_placed));
}

}  // namespace serried
