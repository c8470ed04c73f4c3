// New parts beside existing ones, and how a known value becomes a Partial.
#include "serried/tensor/making/like.h"

#include <ATen/ops/empty_strided.h>

#include <algorithm>

#include "serried/base/error.h"
#include "serried/tensor/dispatch/local_only.h"

namespace serried::detail {

at::Tensor empty_part(const Spec& spec) {
  const LocalOnly guard;
  const c10::DimVector sizes = spec.local_sizes();
  return at::empty_strided(sizes, dense_strides(sizes, spec.strides), at::TensorOptions(spec.dtype));
}

Part empty_beside(const Spec& like, std::optional<at::ScalarType> dtype, at::MemoryFormat format) {
  const SpecPtr spec = intern_spec(like.mesh, without_partial(like.placements), like.sizes,
                                   strides_for(like.sizes, format, like.strides), dtype.value_or(like.dtype));
  return {empty_part(*spec), spec};
}

c10::DimVector strides_for(c10::IntArrayRef sizes, at::MemoryFormat format, c10::IntArrayRef like) {
  if (format == at::MemoryFormat::ChannelsLast) return c10::DimVector(c10::get_channels_last_strides_2d(sizes));
  if (format == at::MemoryFormat::ChannelsLast3d) return c10::DimVector(c10::get_channels_last_strides_3d(sizes));
  const bool has_order = format == at::MemoryFormat::Preserve && !like.empty();
  // An expanded tensor has no memory order of its own to keep.
  if (!has_order || std::find(like.begin(), like.end(), 0) != like.end()) return serried::contiguous_strides(sizes);
  return dense_strides(sizes, like);
}

std::optional<ReduceKind> identity_here(const Placements& placements, const Position& at) {
  for (size_t axis = 0; axis < placements.size(); ++axis) {
    if (!placements[axis].is_partial() || at.coordinate[axis] == 0) continue;
    const ReduceKind kind = placements[axis].reduce();
    if (kind == ReduceKind::sum || kind == ReduceKind::product || kind == ReduceKind::bxor) return kind;
  }
  return std::nullopt;
}

void reject_partial(std::string_view where, const Spec& spec) {
  for (const Placement& placement : spec.placements) {
    if (!placement.is_partial()) continue;
    raise<c10::ValueError>({where, c10::str("random numbers cannot be placed as ", spec.to_string()),
                            "place the tensor with Replicate or Shard instead of Partial"});
  }
}

}  // namespace serried::detail
