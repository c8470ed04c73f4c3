// What one rank holds of a recorded tensor.
#include "tests/conformance/local_values.h"

#include <torch/torch.h>

#include <algorithm>
#include <cstring>

namespace serried::testing {
namespace {

bool can_hold_own_values(const at::Tensor& tensor) {
  return tensor.is_non_overlapping_and_dense();
}

// A tensor of `values` that lies like `like`; contiguous where `like` has elements that share memory.
at::Tensor laid_like(const at::Tensor& values, const at::Tensor& like) {
  if (!can_hold_own_values(like)) return values.contiguous();
  at::Tensor result = at::empty_strided(like.sizes(), like.strides(), like.options());
  result.copy_(values);
  return result;
}

// Element i of rank r: 2x where (r - i) mod n is 0, -x where it is 1, else 0. An x that cannot be doubled is whole on
// the first, a zero keeps its sign everywhere.
at::Tensor split_real(const at::Tensor& x, int64_t rank, int64_t ranks) {
  if (ranks == 1) return x.clone();
  const at::Tensor index = at::arange(x.numel(), at::kLong).view(x.sizes());
  const at::Tensor turn = (rank - index).remainder(ranks);
  const at::Tensor doubled = x * 2;
  const at::Tensor fits = doubled.isfinite();
  const at::Tensor zero = at::zeros_like(x);
  const at::Tensor first = at::where(fits, doubled, x);
  const at::Tensor second = at::where(fits, -x, zero);
  const at::Tensor share = at::where(turn == 0, first, at::where(turn == 1, second, zero));
  return at::where(x == 0, x, share);
}

at::Tensor partial_share(const at::Tensor& full, int64_t rank, int64_t ranks) {
  const at::Tensor x = full.resolve_conj().resolve_neg().contiguous();
  if (!x.is_complex()) return split_real(x, rank, ranks);
  return at::complex(split_real(at::real(x).contiguous(), rank, ranks),
                     split_real(at::imag(x).contiguous(), rank, ranks));
}

at::Tensor cut(const at::Tensor& x, int64_t dim, int64_t rank, int64_t ranks) {
  const int64_t size = x.size(dim);
  const int64_t part = (size + ranks - 1) / ranks;
  const int64_t begin = std::min(rank * part, size);
  return x.narrow(dim, begin, std::min((rank + 1) * part, size) - begin);
}

}  // namespace

at::Tensor exact_copy(const at::Tensor& tensor) {
  const c10::Storage& memory = tensor.storage();
  at::Tensor bytes = at::empty({int64_t(memory.nbytes())}, at::kByte);
  if (memory.nbytes() > 0) std::memcpy(bytes.mutable_data_ptr(), memory.data(), memory.nbytes());
  at::Tensor copy = at::empty({0}, tensor.options());
  copy.set_(bytes.storage(), tensor.storage_offset(), tensor.sizes(), tensor.strides());
  copy._set_conj(tensor.is_conj());
  copy._set_neg(tensor.is_neg());
  return copy;
}

at::Tensor local_value(const at::Tensor& full, const Placements& placements, const Seat& seat) {
  at::Tensor value = full;
  // One split over all axes that are pending: a split of a split would not add up exactly in every order.
  int64_t share = 0, shares = 1;
  for (size_t axis = 0; axis < placements.size(); ++axis) {
    if (!placements[axis].is_partial()) continue;
    share = share * seat.mesh_shape[axis] + seat.coordinate[axis];
    shares *= seat.mesh_shape[axis];
  }
  bool is_whole = true;
  const bool is_split = shares > 1;
  if (is_split) value = partial_share(value, share, shares);
  for (size_t axis = 0; axis < placements.size(); ++axis) {
    if (!placements[axis].is_shard()) continue;
    value = cut(value, placements[axis].dim(), seat.coordinate[axis], seat.mesh_shape[axis]);
    is_whole = false;
  }
  if (!is_whole) return value.clone(at::MemoryFormat::Contiguous);
  return is_split ? laid_like(value, full) : exact_copy(full);
}

}  // namespace serried::testing
