// Collectives that return while they are on their way: the same names and options as the blocking ones.
#pragma once

#include "serried/comm/collectives/collectives.h"

#include <functional>
#include <memory>
#include <vector>

namespace serried {

namespace detail {
class PendingParts;
class PendingState;
}  // namespace detail

/// A collective on its way. A value: copies speak of the same collective. To drop all of them without waiting is fine.
class Pending {
 public:
  /// The result, once it is there, or the tensor that is written; undefined for a barrier. Raises what went wrong. May
  /// be called again, and on any thread; of several Pendings in any order.
  ///     Pending sum = async::all_reduce(x, group);
  ///     compute();
  ///     at::Tensor y = sum.wait();
  at::Tensor wait() const;

  /// Whether wait() would not have to wait for other ranks.
  bool ready() const;

  /// `fn` of the result, or the error that kept it from running. Whoever first waits for it runs it.
  Pending then(std::function<at::Tensor(at::Tensor)> fn) const;

  explicit Pending(std::shared_ptr<detail::PendingState> state) : state_(std::move(state)) {}

 private:
  std::shared_ptr<detail::PendingState> state_;
};

/// A list of tensors on its way: what async::gather gives. The same in all else.
class PendingTensors {
 public:
  std::vector<at::Tensor> wait() const;
  bool ready() const;
  Pending then(std::function<at::Tensor(std::vector<at::Tensor>)> fn) const;

  explicit PendingTensors(std::shared_ptr<detail::PendingParts> state) : state_(std::move(state)) {}

 private:
  std::shared_ptr<detail::PendingParts> state_;
};

/// What is sent, or written by the call, may not be written before wait(), which raises if it was; results are
/// differentiable like those of the blocking calls, whose backward they share.
namespace async {
Pending all_reduce(const at::Tensor& x, const Group& group, const Reduction& op = c10d::ReduceOp::SUM);
Pending all_reduce(const at::Tensor& x, const Group& group, AllReduceOptions options);
Pending all_gather(const at::Tensor& x, const Group& group, AllGatherOptions options = {});
Pending reduce_scatter(const at::Tensor& x, const Group& group, ReduceScatterOptions options = {});
Pending all_to_all(const at::Tensor& x, const Group& group, AllToAllOptions options = {});
Pending broadcast(const at::Tensor& x, const Group& group, BroadcastOptions options = {});
Pending reduce(const at::Tensor& x, const Group& group, ReduceOptions options = {});
PendingTensors gather(const at::Tensor& x, const Group& group, GatherOptions options = {});
Pending scatter(at::TensorList tensors, const Group& group, ScatterOptions options = {});

Pending all_gather_into(const at::Tensor& output, const at::Tensor& x, const Group& group);
Pending reduce_scatter_into(const at::Tensor& output, const at::Tensor& x, const Group& group,
                            const Reduction& op = c10d::ReduceOp::SUM);
Pending all_to_all_into(const at::Tensor& output, const at::Tensor& x, const Group& group);

Pending all_reduce_(const at::Tensor& x, const Group& group, const Reduction& op = c10d::ReduceOp::SUM);
Pending all_reduce_(const at::Tensor& x, const Group& group, AllReduceOptions options);
Pending broadcast_(const at::Tensor& x, const Group& group, BroadcastOptions options = {});

Pending send(const at::Tensor& x, const Group& group, PeerOptions options);
Pending recv(const at::Tensor& x, const Group& group, PeerOptions options);
Pending barrier(const Group& group, BarrierOptions options = {});
}  // namespace async

}  // namespace serried
