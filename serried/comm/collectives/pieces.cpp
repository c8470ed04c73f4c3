// Cutting and joining along a dim.
#include "serried/comm/collectives/pieces.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <numeric>

namespace serried::detail {

std::vector<int64_t> shard_sizes(int64_t size, int num_ranks) {
  const int64_t chunk = (size + num_ranks - 1) / num_ranks;
  std::vector<int64_t> sizes(num_ranks);
  for (int rank = 0; rank < num_ranks; ++rank) {
    sizes[rank] = std::clamp<int64_t>(size - rank * chunk, 0, chunk);
  }
  return sizes;
}

int64_t sum_of(c10::IntArrayRef sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
}

std::vector<int64_t> with_size(c10::IntArrayRef sizes, int64_t dim, int64_t size) {
  std::vector<int64_t> result = sizes.vec();
  result.at(dim) = size;
  return result;
}

std::vector<at::Tensor> cut_pieces(const at::Tensor& x, int64_t dim, c10::IntArrayRef sizes) {
  std::vector<at::Tensor> pieces;
  pieces.reserve(sizes.size());
  int64_t begin = 0;
  for (const int64_t size : sizes) {
    pieces.push_back(x.narrow(dim, begin, size).contiguous());
    begin += size;
  }
  return pieces;
}

ArrivingPieces::ArrivingPieces(const at::Tensor& whole, int64_t dim, c10::IntArrayRef sizes, bool one_each)
    : whole_(whole), dim_(dim) {
  const c10::IntArrayRef before = whole.sizes().slice(0, dim);
  in_place_ = std::all_of(before.begin(), before.end(), [](int64_t size) { return size == 1; });
  const bool are_equal = std::all_of(sizes.begin(), sizes.end(), [&](int64_t size) { return size == sizes[0]; });
  if (in_place_ && are_equal && !one_each) {
    outputs_ = {whole};
    return;
  }
  int64_t begin = 0;
  for (const int64_t size : sizes) {
    outputs_.push_back(in_place_ ? whole.narrow(dim, begin, size)
                                 : at::empty(with_size(whole.sizes(), dim, size), whole.options()));
    begin += size;
  }
}

std::function<void()> ArrivingPieces::what_is_left() const {
  if (in_place_) return nullptr;
  return [whole = whole_, pieces = outputs_, dim = dim_]() mutable { at::cat_out(whole, pieces, dim); };
}

}  // namespace serried::detail
