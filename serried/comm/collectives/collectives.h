// Collectives over a group: functional with gradients, in place, point to point.
#pragma once

#include "serried/comm/groups/group.h"

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

namespace serried {

/// What a collective reduces by: a c10d::ReduceOp or one of its names. PREMUL_SUM needs the factor that
/// c10d::makePreMulSum(factor) gives it: its bare name is a ValueError here, and an internal assert in c10d's own type.
///     all_reduce(x, group, c10d::ReduceOp::AVG);
class Reduction : public c10d::ReduceOp {
 public:
  Reduction(c10d::ReduceOp::RedOpType op);
  Reduction(const c10d::ReduceOp& op) : c10d::ReduceOp(op) {}
};

// A timeout stands in place of the group's, for one call.

struct AllReduceOptions {
  Reduction op = c10d::ReduceOp::SUM;
  std::optional<std::chrono::milliseconds> timeout = {};
};

struct AllGatherOptions {
  int64_t dim = 0;
  std::optional<std::chrono::milliseconds> timeout = {};
};

struct ReduceScatterOptions {
  int64_t dim = 0;
  Reduction op = c10d::ReduceOp::SUM;
  std::optional<std::chrono::milliseconds> timeout = {};
};

struct AllToAllOptions {
  int64_t split_dim = 0;
  int64_t concat_dim = 0;
  std::vector<int64_t> split_sizes =
      {};  // per peer along split_dim; empty: cut like Shard, last ranks smaller or empty
  std::optional<std::chrono::milliseconds> timeout = {};
};

struct BroadcastOptions {
  int src = 0;
  std::optional<std::chrono::milliseconds> timeout = {};
};

struct ReduceOptions {
  int dst = 0;
  Reduction op = c10d::ReduceOp::SUM;
  std::optional<std::chrono::milliseconds> timeout = {};
};

struct GatherOptions {
  int dst = 0;
  std::optional<std::chrono::milliseconds> timeout = {};
};

struct ScatterOptions {
  int src = 0;
  std::optional<std::chrono::milliseconds> timeout = {};
};

struct PeerOptions {
  int peer = 0;
  int tag = 0;
  std::optional<std::chrono::milliseconds> timeout = {};
};

struct BarrierOptions {
  std::optional<std::chrono::milliseconds> timeout = {};
};

/// The reduction of `x` over the group, on every rank, as a new tensor. Gradient: all_reduce with the same op (SUM,
/// AVG).
at::Tensor all_reduce(const at::Tensor& x, const Group& group, const Reduction& op = c10d::ReduceOp::SUM);
at::Tensor all_reduce(const at::Tensor& x, const Group& group, AllReduceOptions options);

/// All ranks' `x` side by side along `dim`, in rank order. Sizes along `dim` may differ. Gradient: reduce_scatter SUM.
at::Tensor all_gather(const at::Tensor& x, const Group& group, AllGatherOptions options = {});

/// This rank's piece of the reduction, cut along `dim` like Shard: ceil, last ranks smaller or empty. Gradient:
/// all_gather.
at::Tensor reduce_scatter(const at::Tensor& x, const Group& group, ReduceScatterOptions options = {});

/// Piece p of `x` along `split_dim` goes to rank p; what comes is laid along `concat_dim`. Gradient: the way back.
at::Tensor all_to_all(const at::Tensor& x, const Group& group, AllToAllOptions options = {});

/// Rank src's `x` on every rank. Gradient: the sum at src, zero elsewhere.
at::Tensor broadcast(const at::Tensor& x, const Group& group, BroadcastOptions options = {});

/// The reduction of `x` over the group on rank dst, zeros of its shape elsewhere. Gradient (SUM, AVG): that of dst's
/// result, on every rank. The others call backward too, on anything made of their zeros; what it says is not read.
at::Tensor reduce(const at::Tensor& x, const Group& group, ReduceOptions options = {});

/// Every rank's `x` on rank dst, in rank order; shapes may differ between ranks. Elsewhere zeros of the same shapes,
/// which take no memory and cannot be written: of these the others call backward. Gradient: each rank gets that of its
/// part. It is there on every rank where any rank's `x` requires grad.
///     std::vector<at::Tensor> parts = gather(predictions, world);
///     if (world->getRank() == 0) save(at::cat(parts));
std::vector<at::Tensor> gather(const at::Tensor& x, const Group& group, GatherOptions options = {});

/// Tensor r of rank src's list on rank r, with its shape and dtype; shapes may differ. The others pass {}. Gradient:
/// each tensor of the list gets that of the rank it went to. All ranks call backward; there is no second gradient.
///     at::Tensor mine = scatter(rank == 0 ? x.tensor_split(4) : std::vector<at::Tensor>(), world);
at::Tensor scatter(at::TensorList tensors, const Group& group, ScatterOptions options = {});

/// Into a given tensor, without gradients and without allocating: equal pieces along dim 0 of contiguous tensors.
/// `output` holds as many elements as all ranks' `x`, one rank's piece of `x`, and as many as `x`.
void all_gather_into(const at::Tensor& output, const at::Tensor& x, const Group& group);
void reduce_scatter_into(const at::Tensor& output, const at::Tensor& x, const Group& group,
                         const Reduction& op = c10d::ReduceOp::SUM);
void all_to_all_into(const at::Tensor& output, const at::Tensor& x, const Group& group);

/// In place, without gradients.
void all_reduce_(const at::Tensor& x, const Group& group, const Reduction& op = c10d::ReduceOp::SUM);
void all_reduce_(const at::Tensor& x, const Group& group, AllReduceOptions options);
void broadcast_(const at::Tensor& x, const Group& group, BroadcastOptions options = {});

/// Returns when every rank has called it.
void barrier(const Group& group, BarrierOptions options = {});

/// Blocking point to point; one send meets one recv of the same peer pair and tag, in order.
void send(const at::Tensor& x, const Group& group, PeerOptions options);
void recv(const at::Tensor& x, const Group& group, PeerOptions options);

/// "sum" "avg" "product" "min" "max" "band" "bor" "bxor"; ValueError that lists them for any other text.
c10d::ReduceOp parse_reduce_op(std::string_view name);

/// The same text back.
std::string to_string(c10d::ReduceOp::RedOpType op);

}  // namespace serried
