// Which elements of a tensor one rank holds: said by its placements, and as runs of consecutive places.
#pragma once

#include <c10/util/ArrayRef.h>

#include <vector>

#include "serried/mesh/layout.h"
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

/// Runs [begin, begin + size) of the row-major tensor of `sizes`, ascending: the elements whose index in each dim d
/// lies in `spans[d]`. Their order is the row-major order of the part. Holds a few words per span, never one per
/// element.
class OwnedRuns {
 public:
  OwnedRuns(c10::IntArrayRef sizes, std::vector<std::vector<Span>> spans);
  /// The rank's part as `placements` say; dims in the order of `order`, outermost first (empty: as they are).
  OwnedRuns(c10::IntArrayRef sizes, c10::ArrayRef<Placement> placements, const Position& at,
            c10::IntArrayRef order = {});

  /// False at the end.
  bool next(Span& run);
  /// Elements in all runs.
  int64_t numel() const { return numel_; }

 private:
  struct Dim {
    std::vector<Span> spans;
    int64_t step = 1;  // elements between neighbours
    size_t span = 0;   // where the walk is
    int64_t index = 0;
  };
  void prepare(c10::IntArrayRef sizes, std::vector<std::vector<Span>> spans);
  bool advance_outer();

  std::vector<Dim> dims_;  // down to the last one that is not whole; those behind it are part of its step
  int64_t numel_ = 0;
  bool done_ = false;
};

}  // namespace serried::detail
