// Takes row-major indices apart into coordinates, moves these, and puts them together again.
#include "serried/tensor/images/max_indices.h"

#include <ATen/ATen.h>

namespace serried::detail {
namespace {

template <class Move>
at::Tensor moved(const at::Tensor& indices, const Sizes& from, const Sizes& to, Move move) {
  at::Tensor rest = indices, result;
  int64_t stride = 1;
  for (size_t d = from.size(); d-- > 0;) {
    const at::Tensor coordinate = d == 0 ? rest : rest.remainder(from[d]);
    if (d > 0) rest = rest.div(from[d], "floor");
    const at::Tensor term = move(d, coordinate) * stride;
    result = result.defined() ? result + term : term;
    stride *= to[d];
  }
  return result;
}

Sizes sizes_of(const std::vector<Span>& rows) {
  Sizes sizes;
  for (const Span& span : rows) sizes.push_back(span.size);
  return sizes;
}

}  // namespace

std::vector<Span> rows_read(const ImageCut& cut) {
  std::vector<Span> rows;
  for (size_t d = 0; d < cut.space().ndim(); ++d) rows.push_back(cut.rows(d));
  return rows;
}

at::Tensor of_whole_image(const at::Tensor& indices, const std::vector<Span>& rows, const Sizes& sizes,
                          const std::vector<int64_t>& dilations) {
  return moved(indices, sizes_of(rows), sizes, [&](size_t d, const at::Tensor& coordinate) {
    const at::Tensor row = coordinate + rows[d].begin;
    return rows[d].begin < 0 ? at::where(row < 0, row.remainder(dilations[d]), row) : row;
  });
}

at::Tensor of_rows(const at::Tensor& indices, const std::vector<Span>& rows, const Sizes& sizes) {
  return moved(indices, sizes, sizes_of(rows),
               [&](size_t d, const at::Tensor& coordinate) { return coordinate - rows[d].begin; });
}

}  // namespace serried::detail
