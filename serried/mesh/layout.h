// Which part of a tensor each rank of a mesh holds: arithmetic on sizes, exact for uneven and empty parts.
#pragma once

#include <c10/util/ArrayRef.h>
#include <c10/util/DimVector.h>

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <utility>
#include <vector>

#include "serried/mesh/placement.h"

namespace serried {

/// Sizes that own their memory.
using Sizes = std::vector<int64_t>;

/// Of options: empty and absent are different things. Takes what tensors give: {.shape = x.sizes()}.
class OptionalSizes : public std::optional<Sizes> {
 public:
  using std::optional<Sizes>::optional;
  OptionalSizes() = default;
  OptionalSizes(std::optional<Sizes> sizes) : std::optional<Sizes>(std::move(sizes)) {}
  OptionalSizes(c10::IntArrayRef sizes) : std::optional<Sizes>(sizes.vec()) {}
  OptionalSizes(std::initializer_list<int64_t> sizes) : std::optional<Sizes>(sizes) {}
};

/// Indices [begin, begin + size).
struct Span {
  int64_t begin = 0;
  int64_t size = 0;
  int64_t end() const { return begin + size; }
  bool operator==(const Span&) const = default;
};

/// Chunk `index` of `size` cut in `chunks` that differ by at most one in length, longer ones first.
///     even_chunk(6, 4, 0..3)  ->  [0,2) [2,4) [4,5) [5,6)
Span even_chunk(int64_t size, int64_t chunks, int64_t index);

/// Part `index` of `size` cut in `parts`: ceil(size / parts) each, the last ones less or nothing.
///     chunk(5, 4, 0..3)  ->  [0,2) [2,4) [4,5) [5,5)
Span chunk(int64_t size, int64_t parts, int64_t index);

/// Where one rank stands in a mesh.
struct Position {
  c10::IntArrayRef mesh_shape;
  c10::IntArrayRef coordinate;  // one per axis
};

/// The indices of a dim of `size` that the rank holds, ascending: several spans where a cut is strided or balanced.
/// Axes cut left to right. Empty spans are left out, so a rank without elements gets none.
std::vector<Span> owned_spans(int64_t size, int64_t dim, c10::ArrayRef<Placement> placements, const Position& at);

/// How many of them.
int64_t local_size(int64_t size, int64_t dim, c10::ArrayRef<Placement> placements, const Position& at);

/// The shape of the rank's part. Communicates nothing.
///     local_sizes({10, 4}, S0 over 4 ranks)  ->  {3,4} {3,4} {3,4} {1,4}
c10::DimVector local_sizes(c10::IntArrayRef global, c10::ArrayRef<Placement> placements, const Position& at);

/// The first global index of each dim; of an empty part the place where it would begin. Several spans: the
/// first one's.
c10::DimVector local_offsets(c10::IntArrayRef global, c10::ArrayRef<Placement> placements, const Position& at);

/// Dense strides that keep the memory order of `strides`; a stride of 0 stays where the size is not 1.
c10::DimVector dense_strides(c10::IntArrayRef sizes, c10::IntArrayRef strides);

/// Row-major strides.
c10::DimVector contiguous_strides(c10::IntArrayRef sizes);

/// Into how many parts all axes together cut `dim`.
int64_t num_shards(int64_t dim, c10::ArrayRef<Placement> placements, c10::IntArrayRef mesh_shape);

/// Whether every dim is cut in equal parts.
bool is_even(c10::IntArrayRef global, c10::ArrayRef<Placement> placements, c10::IntArrayRef mesh_shape);

/// The coordinate of the `index`-th rank in row-major order.
c10::DimVector coordinate_of(int64_t index, c10::IntArrayRef mesh_shape);

}  // namespace serried
