// The collectives as ops, for layers that have checked their arguments. Sizes say what every rank holds along a dim, so
// that shapes are known without communicating.
#pragma once

#include "serried/comm/collectives/collective.h"
#include "serried/comm/groups/group.h"

#include <ATen/core/Tensor.h>

namespace serried::detail {

using ReduceOpPtr = c10::intrusive_ptr<c10d::ReduceOp>;

/// `op` as ops take it; the plain ones are shared, so that a call allocates nothing.
ReduceOpPtr share(const c10d::ReduceOp& op);

/// Those with `started` only start where somebody wants the Work.
namespace ops {
at::Tensor all_reduce(const at::Tensor& x, const Group& group, const ReduceOpPtr& op, WorkPtr* started = nullptr);
void all_reduce_(const at::Tensor& x, const Group& group, const ReduceOpPtr& op, WorkPtr* started = nullptr);
at::Tensor all_gather(const at::Tensor& x, const Group& group, int64_t dim, at::IntArrayRef sizes,
                      WorkPtr* started = nullptr);
void all_gather_into(const at::Tensor& output, const at::Tensor& x, const Group& group, WorkPtr* started = nullptr);
at::Tensor reduce_scatter(const at::Tensor& x, const Group& group, int64_t dim, at::IntArrayRef sizes,
                          const ReduceOpPtr& op, WorkPtr* started = nullptr);
void reduce_scatter_into(const at::Tensor& output, const at::Tensor& x, const Group& group, const ReduceOpPtr& op,
                         WorkPtr* started = nullptr);
/// Piece p has split_sizes[p] along split_dim; from rank p come concat_sizes[p] along concat_dim. `sizes_of_all` is a
/// watch::hash_sizes of what tells every rank its sizes; 0 where nothing does.
at::Tensor all_to_all(const at::Tensor& x, const Group& group, int64_t split_dim, int64_t concat_dim,
                      at::IntArrayRef split_sizes, at::IntArrayRef concat_sizes, uint32_t sizes_of_all,
                      WorkPtr* started = nullptr);
void all_to_all_into(const at::Tensor& output, const at::Tensor& x, const Group& group, WorkPtr* started = nullptr);
at::Tensor broadcast(const at::Tensor& x, const Group& group, int64_t src);
/// The reduction at rank dst, zeros elsewhere; the sum is the gradient of broadcast.
at::Tensor reduce(const at::Tensor& x, const Group& group, int64_t dst, const ReduceOpPtr& op);
/// Tensors of one dim; sizes[p] elements are rank p's, and `sizes_of_all` as above. Rank dst gets all of them in a row,
/// the others as many zeros.
at::Tensor gather(const at::Tensor& x, const Group& group, int64_t dst, at::IntArrayRef sizes, uint32_t sizes_of_all);
/// The way back: `x` has all elements, and is read at rank src only.
at::Tensor scatter(const at::Tensor& x, const Group& group, int64_t src, at::IntArrayRef sizes, uint32_t sizes_of_all);

/// Started only, below autograd: there is neither a gradient nor a count of the write. Sparse tensors are added up by
/// c10d's call.
WorkPtr start_all_reduce_(const at::Tensor& x, const Group& group, const ReduceOpPtr& op);
WorkPtr start_broadcast_(const at::Tensor& x, const Group& group, int64_t src);
}  // namespace ops

}  // namespace serried::detail
