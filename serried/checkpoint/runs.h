// Which bytes of a row-major tensor a rank holds: runs of them, as they lie in the file and in its memory.
#pragma once

#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "serried/mesh/layout.h"
#include "serried/tensor/spec.h"

namespace serried::checkpoint::detail {

/// Bytes, from the begin of the tensor in the file and from the begin of the rank's part, which is row-major too.
struct Run {
  int64_t in_file;
  int64_t in_part;
  int64_t num_bytes;
};

/// Per dim the indices that a rank holds.
struct Region {
  std::vector<int64_t> sizes;
  std::vector<std::vector<Span>> spans;

  static Region whole(c10::IntArrayRef sizes);
  static Region of(const Spec& spec);
  static Region of(const Spec& spec, const Placements& placements);
  static Region of(c10::IntArrayRef sizes, const Placements& placements, const Position& at);

  std::vector<int64_t> part_sizes() const;
  int64_t num_elements() const;
};

/// In ascending order of both; runs that touch are one.
void for_each_run(const Region& region, int64_t element_bytes, const std::function<void(const Run&)>& visit);

/// Placements that cut the same ranks' parts along rows, where the parts that `spec` says lie in many short runs; empty
/// where they are good as they are. The same on every rank of the mesh.
Placements rows_instead(const Spec& spec);

}  // namespace serried::checkpoint::detail
