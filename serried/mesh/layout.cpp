// The arithmetic of cuts: every axis cuts what the axes before it have left.
#include "serried/mesh/layout.h"

#include <algorithm>
#include <array>

#include <c10/util/Exception.h>

namespace serried {
namespace {

int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// What a rank has of a balanced cut: one chunk from either end, ascending. Empty ones are there, too.
std::array<Span, 2> balanced_chunks(int64_t size, int64_t parts, int64_t index) {
  return {even_chunk(size, 2 * parts, index), even_chunk(size, 2 * parts, 2 * parts - 1 - index)};
}

// How many of `size` indices rank `index` of `parts` holds: of all full pieces the same, of the last one less.
int64_t cut_size(int64_t size, const Placement& placement, int64_t parts, int64_t index) {
  if (!placement.is_strided()) return chunk(size, parts, index).size;
  if (size == 0) return 0;
  if (placement.is_balanced()) {
    const auto [front, back] = balanced_chunks(size, parts, index);
    return front.size + back.size;
  }
  const int64_t piece = ceil_div(size, placement.split_factor());
  return size / piece * chunk(piece, parts, index).size + chunk(size % piece, parts, index).size;
}

// Appends, or lengthens the last span where `span` follows it.
void append(std::vector<Span>& spans, const Span& span) {
  if (!spans.empty() && spans.back().end() == span.begin) {
    spans.back().size += span.size;
  } else {
    spans.push_back(span);
  }
}

// The same as spans within [0, size).
std::vector<Span> cut_spans(int64_t size, const Placement& placement, int64_t parts, int64_t index) {
  std::vector<Span> spans;
  if (placement.is_balanced()) {
    for (const Span& chunk : balanced_chunks(size, parts, index)) {
      if (chunk.size != 0) append(spans, chunk);
    }
    return spans;
  }
  for (int64_t i = 0; i < placement.split_factor(); ++i) {
    const Span piece = chunk(size, placement.split_factor(), i);
    if (piece.size == 0) break;
    const Span part = chunk(piece.size, parts, index);
    if (part.size != 0) spans.push_back({piece.begin + part.begin, part.size});
  }
  return spans;
}

// `picked`, which counts along the concatenation of `held`, in the indices of `held`. Both ascend: one pass.
std::vector<Span> compose(const std::vector<Span>& held, const std::vector<Span>& picked) {
  std::vector<Span> result;
  size_t h = 0;
  int64_t before = 0;  // elements in held spans left of h
  for (Span rest : picked) {
    while (rest.size > 0) {
      while (rest.begin >= before + held[h].size) before += held[h++].size;
      const int64_t skip = rest.begin - before;
      const int64_t size = std::min(rest.size, held[h].size - skip);
      append(result, {held[h].begin + skip, size});
      rest = {rest.begin + size, rest.size - size};
    }
  }
  return result;
}

int64_t total(const std::vector<Span>& spans) {
  int64_t size = 0;
  for (const Span& span : spans) size += span.size;
  return size;
}

// The index `place` steps into `spans`; their end where they are shorter.
int64_t index_at(const std::vector<Span>& spans, int64_t place) {
  for (const Span& span : spans) {
    if (place < span.size) return span.begin + place;
    place -= span.size;
  }
  return spans.back().end();
}

// The first index, and where the first piece's part would begin for a rank that gets nothing.
int64_t strided_offset(int64_t size, int64_t dim, c10::ArrayRef<Placement> placements, const Position& at) {
  std::vector<Span> held = {{0, size}};
  for (size_t axis = 0; axis < placements.size(); ++axis) {
    if (!placements[axis].is_shard(dim)) continue;
    const int64_t extent = total(held);
    const auto picked = cut_spans(extent, placements[axis], at.mesh_shape[axis], at.coordinate[axis]);
    if (picked.empty() && placements[axis].is_balanced()) {
      return index_at(held, balanced_chunks(extent, at.mesh_shape[axis], at.coordinate[axis])[0].begin);
    }
    if (picked.empty()) {
      const int64_t piece = chunk(extent, placements[axis].split_factor(), 0).size;
      return index_at(held, chunk(piece, at.mesh_shape[axis], at.coordinate[axis]).begin);
    }
    held = compose(held, picked);
  }
  return held.front().begin;
}

bool has_strided(c10::ArrayRef<Placement> placements) {
  return std::any_of(placements.begin(), placements.end(), [](const Placement& p) { return p.is_strided(); });
}

}  // namespace

Span even_chunk(int64_t size, int64_t chunks, int64_t index) {
  const int64_t longer = size % chunks;  // so many have one more
  return {index * (size / chunks) + std::min(index, longer), size / chunks + (index < longer ? 1 : 0)};
}

Span chunk(int64_t size, int64_t parts, int64_t index) {
  const int64_t full = ceil_div(size, parts);
  const int64_t begin = std::min(index * full, size);
  return {begin, std::min(full, size - begin)};
}

std::vector<Span> owned_spans(int64_t size, int64_t dim, c10::ArrayRef<Placement> placements, const Position& at) {
  std::vector<Span> held;
  if (size > 0) held.push_back({0, size});
  for (size_t axis = 0; axis < placements.size(); ++axis) {
    if (!placements[axis].is_shard(dim)) continue;
    held = compose(held, cut_spans(total(held), placements[axis], at.mesh_shape[axis], at.coordinate[axis]));
  }
  return held;
}

int64_t local_size(int64_t size, int64_t dim, c10::ArrayRef<Placement> placements, const Position& at) {
  for (size_t axis = 0; axis < placements.size(); ++axis) {
    if (!placements[axis].is_shard(dim)) continue;
    size = cut_size(size, placements[axis], at.mesh_shape[axis], at.coordinate[axis]);
  }
  return size;
}

c10::DimVector local_sizes(c10::IntArrayRef global, c10::ArrayRef<Placement> placements, const Position& at) {
  c10::DimVector sizes(global.begin(), global.end());
  for (size_t axis = 0; axis < placements.size(); ++axis) {
    if (!placements[axis].is_shard()) continue;
    TORCH_INTERNAL_ASSERT_DEBUG_ONLY(size_t(placements[axis].dim()) < sizes.size());
    int64_t& size = sizes[size_t(placements[axis].dim())];
    size = cut_size(size, placements[axis], at.mesh_shape[axis], at.coordinate[axis]);
  }
  return sizes;
}

c10::DimVector local_offsets(c10::IntArrayRef global, c10::ArrayRef<Placement> placements, const Position& at) {
  c10::DimVector offsets(global.size(), 0);
  if (has_strided(placements)) {
    for (size_t dim = 0; dim < global.size(); ++dim) {
      offsets[dim] = strided_offset(global[dim], int64_t(dim), placements, at);
    }
    return offsets;
  }
  c10::DimVector sizes(global.begin(), global.end());
  for (size_t axis = 0; axis < placements.size(); ++axis) {
    if (!placements[axis].is_shard()) continue;
    const auto dim = size_t(placements[axis].dim());
    const Span part = chunk(sizes[dim], at.mesh_shape[axis], at.coordinate[axis]);
    offsets[dim] += part.begin;
    sizes[dim] = part.size;
  }
  return offsets;
}

c10::DimVector dense_strides(c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  c10::SmallVector<size_t, c10::kDimVectorStaticSize> order;
  for (size_t dim = 0; dim < sizes.size(); ++dim) order.push_back(dim);
  // Of equal strides a dim of size 1 goes inside: it then keeps its stride, so that dense strides come back unchanged.
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    if (strides[a] != strides[b]) return strides[a] > strides[b];
    return sizes[a] != 1 && sizes[b] == 1;
  });
  c10::DimVector dense(sizes.size(), 0);
  int64_t stride = 1;
  for (auto dim = order.rbegin(); dim != order.rend(); ++dim) {
    if (strides[*dim] == 0 && sizes[*dim] != 1) continue;
    dense[*dim] = stride;
    stride *= std::max<int64_t>(sizes[*dim], 1);
  }
  return dense;
}

c10::DimVector contiguous_strides(c10::IntArrayRef sizes) {
  c10::DimVector strides(sizes.size(), 1);
  for (size_t dim = sizes.size(); dim-- > 1;) strides[dim - 1] = strides[dim] * std::max<int64_t>(sizes[dim], 1);
  return strides;
}

int64_t num_shards(int64_t dim, c10::ArrayRef<Placement> placements, c10::IntArrayRef mesh_shape) {
  int64_t shards = 1;
  for (size_t axis = 0; axis < placements.size(); ++axis) {
    if (placements[axis].is_shard(dim)) shards *= mesh_shape[axis];
  }
  return shards;
}

bool is_even(c10::IntArrayRef global, c10::ArrayRef<Placement> placements, c10::IntArrayRef mesh_shape) {
  for (size_t axis = 0; axis < placements.size(); ++axis) {
    if (!placements[axis].is_shard()) continue;
    const int64_t dim = placements[axis].dim();
    const int64_t shards = num_shards(dim, placements.slice(0, axis + 1), mesh_shape);
    const int64_t pieces = placements[axis].is_balanced() ? 1 : placements[axis].split_factor();
    if (global[size_t(dim)] % (shards * pieces) != 0) return false;
  }
  return true;
}

c10::DimVector coordinate_of(int64_t index, c10::IntArrayRef mesh_shape) {
  c10::DimVector coordinate(mesh_shape.size(), 0);
  for (size_t axis = mesh_shape.size(); axis-- > 0;) {
    coordinate[axis] = index % mesh_shape[axis];
    index /= mesh_shape[axis];
  }
  return coordinate;
}

}  // namespace serried
