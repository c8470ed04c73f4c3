// The collectives as dispatcher ops serried::*, so that modes and recorders see them. Arguments are already checked.
#pragma once

#include "serried/comm/groups/group.h"

#include <ATen/core/Tensor.h>

namespace serried::detail {

using ReduceOpPtr = c10::intrusive_ptr<c10d::ReduceOp>;

/// `op` as ops take it; the plain ones are shared, so that a call allocates nothing.
ReduceOpPtr share(const c10d::ReduceOp& op);

/// Calls through the dispatcher. Sizes say what every rank holds along a dim, so shapes are known without
/// communicating.
namespace ops {
at::Tensor all_reduce(const at::Tensor& x, const Group& group, const ReduceOpPtr& op);
at::Tensor all_gather(const at::Tensor& x, const Group& group, int64_t dim, at::IntArrayRef sizes);
at::Tensor reduce_scatter(const at::Tensor& x, const Group& group, int64_t dim, at::IntArrayRef sizes,
                          const ReduceOpPtr& op);
/// Piece p has split_sizes[p] along split_dim; from rank p come concat_sizes[p] along concat_dim.
at::Tensor all_to_all(const at::Tensor& x, const Group& group, int64_t split_dim, int64_t concat_dim,
                      at::IntArrayRef split_sizes, at::IntArrayRef concat_sizes);
at::Tensor broadcast(const at::Tensor& x, const Group& group, int64_t src);
/// The sum at rank dst, zeros elsewhere: the gradient of broadcast.
at::Tensor reduce(const at::Tensor& x, const Group& group, int64_t dst);
void all_gather_into(const at::Tensor& output, const at::Tensor& x, const Group& group);
void reduce_scatter_into(const at::Tensor& output, const at::Tensor& x, const Group& group, const ReduceOpPtr& op);
void all_to_all_into(const at::Tensor& output, const at::Tensor& x, const Group& group);
void all_reduce_(const at::Tensor& x, const Group& group, const ReduceOpPtr& op);
void broadcast_(const at::Tensor& x, const Group& group, int64_t src);
void send(const at::Tensor& x, const Group& group, int64_t peer, int64_t tag);
void recv_(const at::Tensor& x, const Group& group, int64_t peer, int64_t tag);
void barrier(const Group& group);
}  // namespace ops

/// The kernels that communicate, for tensors of any device that the group serves.
namespace device {
at::Tensor all_reduce(const at::Tensor& x, const Group& group, const ReduceOpPtr& op);
at::Tensor all_gather(const at::Tensor& x, const Group& group, int64_t dim, at::IntArrayRef sizes);
at::Tensor reduce_scatter(const at::Tensor& x, const Group& group, int64_t dim, at::IntArrayRef sizes,
                          const ReduceOpPtr& op);
at::Tensor all_to_all(const at::Tensor& x, const Group& group, int64_t split_dim, int64_t concat_dim,
                      at::IntArrayRef split_sizes, at::IntArrayRef concat_sizes);
at::Tensor broadcast(const at::Tensor& x, const Group& group, int64_t src);
at::Tensor reduce(const at::Tensor& x, const Group& group, int64_t dst);
void all_reduce_(const at::Tensor& x, const Group& group, const ReduceOpPtr& op);
void broadcast_(const at::Tensor& x, const Group& group, int64_t src);
void send(const at::Tensor& x, const Group& group, int64_t peer, int64_t tag);
void recv_(const at::Tensor& x, const Group& group, int64_t peer, int64_t tag);
void barrier(const Group& group);
}  // namespace device

/// Output shapes, for the Meta kernels and the ones that communicate.
std::vector<int64_t> gathered_shape(const at::Tensor& x, int64_t dim, at::IntArrayRef sizes);
std::vector<int64_t> scattered_shape(const at::Tensor& x, int rank, int64_t dim, at::IntArrayRef sizes);
std::vector<int64_t> exchanged_shape(const at::Tensor& x, int rank, int64_t split_dim, int64_t concat_dim,
                                     at::IntArrayRef split_sizes, at::IntArrayRef concat_sizes);

}  // namespace serried::detail
