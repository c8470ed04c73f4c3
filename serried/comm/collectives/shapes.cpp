// Shapes of the collectives' outputs, and the Meta kernels made of them.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "serried/comm/collectives/cut.h"
#include "serried/comm/collectives/ops.h"

namespace serried::detail {

std::vector<int64_t> gathered_shape(const at::Tensor& x, int64_t dim, at::IntArrayRef sizes) {
  return with_size(x.sizes(), dim, sum_of(sizes));
}

std::vector<int64_t> scattered_shape(const at::Tensor& x, int rank, int64_t dim, at::IntArrayRef sizes) {
  return with_size(x.sizes(), dim, sizes[rank]);
}

std::vector<int64_t> exchanged_shape(const at::Tensor& x, int rank, int64_t split_dim, int64_t concat_dim,
                                     at::IntArrayRef split_sizes, at::IntArrayRef concat_sizes) {
  // Where both dims are one, what comes replaces what went.
  const std::vector<int64_t> piece = with_size(x.sizes(), split_dim, split_sizes[rank]);
  return with_size(piece, concat_dim, sum_of(concat_sizes));
}

namespace {

at::Tensor empty_reduced(const at::Tensor& x, const Group&, const ReduceOpPtr&) {
  return at::empty(x.sizes(), x.options());
}

at::Tensor empty_gathered(const at::Tensor& x, const Group&, int64_t dim, at::IntArrayRef sizes) {
  return at::empty(gathered_shape(x, dim, sizes), x.options());
}

at::Tensor empty_scattered(const at::Tensor& x, const Group& group, int64_t dim, at::IntArrayRef sizes,
                           const ReduceOpPtr&) {
  return at::empty(scattered_shape(x, group->getRank(), dim, sizes), x.options());
}

at::Tensor empty_exchanged(const at::Tensor& x, const Group& group, int64_t split_dim, int64_t concat_dim,
                           at::IntArrayRef split_sizes, at::IntArrayRef concat_sizes) {
  return at::empty(exchanged_shape(x, group->getRank(), split_dim, concat_dim, split_sizes, concat_sizes), x.options());
}

at::Tensor like(const at::Tensor& x, const Group&, int64_t) {
  return at::empty(x.sizes(), x.options());
}

void reduced_in_place(const at::Tensor&, const Group&, const ReduceOpPtr&) {}
void in_place(const at::Tensor&, const Group&, int64_t) {}
void point_to_point(const at::Tensor&, const Group&, int64_t, int64_t) {}

TORCH_LIBRARY_IMPL(serried, Meta, m) {
  m.impl("all_gather", empty_gathered);
  m.impl("all_reduce", empty_reduced);
  m.impl("all_reduce_", reduced_in_place);
  m.impl("all_to_all", empty_exchanged);
  m.impl("broadcast", like);
  m.impl("broadcast_", in_place);
  m.impl("recv_", point_to_point);
  m.impl("reduce", like);
  m.impl("reduce_scatter", empty_scattered);
  m.impl("send", point_to_point);
}

}  // namespace
}  // namespace serried::detail
