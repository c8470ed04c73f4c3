// Which part of a tensor is meant: as a Spec says it, or as an op carries it in its arguments.
#pragma once

#include "serried/tensor/spec.h"

namespace serried::detail {

/// Refers to what it was made of.
struct PlacedPart {
  PlacedPart(const Spec& spec)  // NOLINT(google-explicit-constructor): a spec says all of it
      : sizes(spec.sizes), strides(spec.strides), placements(spec.placements), at(spec.mesh.position()) {}
  PlacedPart(c10::IntArrayRef sizes_, c10::IntArrayRef strides_, const Placements& placements_, Position at_)
      : sizes(sizes_), strides(strides_), placements(placements_), at(at_) {}

  c10::IntArrayRef sizes;  // of the whole
  c10::IntArrayRef strides;
  c10::ArrayRef<Placement> placements;
  Position at;
};

}  // namespace serried::detail
