// distribute_tensor: one rank's tensor becomes everybody's parts.
#include <ATen/ATen.h>

#include "serried/base/error.h"
#include "serried/comm/collectives/collectives.h"
#include "serried/comm/collectives/watch.h"
#include "serried/tensor/dtensor.h"
#include "serried/tensor/making/unchecked.h"
#include "serried/tensor/making/placing.h"
#include "serried/tensor/meta.h"
#include "serried/tensor/redistribute/redistribute.h"
#include "serried/tensor/spec.h"

namespace serried {
namespace {

// A tensor of `sizes` on `mesh` on its way: axes before the present one are placed, later ones hold the whole.
struct Journey {
  std::string_view where;
  const DeviceMesh& mesh;
  c10::IntArrayRef sizes;
  Placements placements;

  c10::DimVector local_sizes() const { return serried::local_sizes(sizes, placements, mesh.position()); }
};

// Only what a rank keeps is sent: the others' pieces of this all-to-all are empty.
at::Tensor scatter(const at::Tensor& whole, const Journey& before, int64_t axis, const Journey& after, int source) {
  const Group group = before.mesh.get_group(axis);
  const int64_t dim = after.placements[size_t(axis)].dim();
  const int64_t num_ranks = group->getSize();
  std::vector<int64_t> pieces(static_cast<size_t>(num_ranks), 0);
  at::Tensor sent = whole.narrow(dim, 0, 0);
  if (group->getRank() == source) {
    for (int64_t i = 0; i < num_ranks; ++i) pieces[size_t(i)] = chunk(whole.size(dim), num_ranks, i).size;
    sent = whole;
  }
  at::Tensor part = all_to_all(sent, group, {.split_dim = dim, .concat_dim = dim, .split_sizes = pieces});
  if (part.sizes() == after.local_sizes()) return part;
  raise<c10::ValueError>(
      {after.where,
       c10::str("this rank's tensor is ", detail::sizes_text(after.sizes), ", but the part that came from rank ",
                source, " of axis ", axis, " is ", detail::sizes_text(part.sizes()), " instead of ",
                detail::sizes_text(after.local_sizes())),
       "pass a tensor of the same shape on every rank of the mesh"});
}

// One axis of the way. `part` is the value only where every later axis' coordinate is the source.
at::Tensor place_axis(const at::Tensor& part, const Journey& before, int64_t axis, Placement to, int source) {
  Journey after = before;
  after.placements[size_t(axis)] = to;
  if (to.is_shard() && !to.is_strided()) return scatter(part, before, axis, after, source);
  const at::Tensor value = broadcast(part, before.mesh.get_group(axis), {.src = source});
  if (to.is_replicate()) return value;
  const SpecPtr from = intern_spec(before.mesh, before.placements, before.sizes,
                                   serried::contiguous_strides(before.sizes), part.scalar_type());
  return redistribute_local(value, *from, after.placements);
}

at::Tensor placed_from(const at::Tensor& full, Journey journey, const Placements& placements, int source) {
  const DeviceMesh& mesh = journey.mesh;
  at::Tensor part = full;
  for (int64_t axis = 0; axis < mesh.ndim(); ++axis) {
    bool is_on_the_way = true;  // else a later axis brings the value
    for (int64_t later = axis + 1; later < mesh.ndim(); ++later) {
      is_on_the_way = is_on_the_way && mesh.get_local_rank(later) == source;
    }
    const Placement to = placements[size_t(axis)];
    if (is_on_the_way && mesh.size(axis) > 1) part = place_axis(part, journey, axis, to, source);
    journey.placements[size_t(axis)] = to;
    if (!is_on_the_way) part = at::empty(journey.local_sizes(), full.options());
  }
  return part;
}

at::Tensor cut_own(const at::Tensor& full, const Journey& journey, const Placements& placements) {
  const SpecPtr from = intern_spec(journey.mesh, journey.placements, journey.sizes,
                                   serried::contiguous_strides(journey.sizes), full.scalar_type());
  return redistribute_local(full, *from, placements);
}

void check_source(std::string_view where, const DeviceMesh& mesh, int source) {
  for (int64_t axis = 0; axis < mesh.ndim(); ++axis) {
    if (source >= 0 && source < mesh.size(axis)) continue;
    raise<c10::ValueError>({where,
                            c10::str("source is ", source, ", but axis ", axis, " of ", mesh.to_string(), " has ",
                                     mesh.size(axis), " ranks"),
                            "pass a rank that every axis has, 0 by default"});
  }
}

DTensor same_or_raise(const at::Tensor& t, const DeviceMesh& mesh, const Placements& placements) {
  const Spec& spec = *dtensor_meta(t)->spec;
  const Placements placed = detail::resolved_placements("distribute_tensor", placements, t.dim(), mesh, spec.dtype);
  if (mesh == spec.mesh && placed == spec.placements) return DTensor(t);
  raise<c10::ValueError>({"distribute_tensor",
                          c10::str("the tensor is already distributed: ", spec.to_string(), ", not \"",
                                   to_string(placed), "\" on ", mesh.to_string()),
                          "use d.redistribute(placements), or d.redistribute(mesh, placements) for another mesh"});
}

}  // namespace

namespace detail {

at::Tensor distributed_part(std::string_view where, const at::Tensor& full, const DeviceMesh& mesh,
                            const Placements& placements, std::optional<int> source) {
  const at::NoGradGuard no_grad;
  if (source.has_value()) check_source(where, mesh, *source);
  const at::Tensor plain = full.detach().resolve_conj().resolve_neg().contiguous();
  const Journey journey{where, mesh, plain.sizes(), Placements(placements.size())};
  // Fake peers send nothing: a plan made on one machine takes its own values.
  if (mesh.root_group()->getBackendName() == "fake") source.reset();
  const at::Tensor part =
      source.has_value() ? placed_from(plain, journey, placements, *source) : cut_own(plain, journey, placements);
  // Never the user's own memory, for any number of ranks.
  return part.is_alias_of(full) ? part.clone(at::MemoryFormat::Contiguous) : part.contiguous();
}

}  // namespace detail

DTensor distribute_tensor(const at::Tensor& full, const DeviceMesh& mesh, const Placements& placements,
                          DistributeOptions options) {
  constexpr const char* kWhere = "distribute_tensor";
  if (!full.defined()) raise<c10::ValueError>({kWhere, "the tensor is undefined", "pass a tensor on every rank"});
  if (is_dtensor(full)) return same_or_raise(full, mesh, placements);
  if (!full.is_leaf()) {
    raise<c10::ValueError>({kWhere, watch::describe_tensor(full) + " is the result of an op that autograd recorded",
                            "pass full.detach(), or use DTensor::from_local, which is differentiable"});
  }
  detail::check_in_mesh(kWhere, mesh);
  const Placements placed = detail::resolved_placements(kWhere, placements, full.dim(), mesh, full.scalar_type());
  at::Tensor part = detail::distributed_part(kWhere, full, mesh, placed, options.source);
  SpecPtr spec = spec_of_result(part, mesh, placed, full.sizes());
  at::Tensor result = wrap(std::move(part), std::move(spec));
  if (full.requires_grad()) result.requires_grad_(true);
  return DTensor(result);
}

}  // namespace serried
