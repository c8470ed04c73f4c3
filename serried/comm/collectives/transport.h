// The way from a collective to a backend: the direct one where the backend has it, else c10d's Work.
#pragma once

#include "serried/comm/collectives/direct.h"
#include "serried/comm/groups/group.h"

#include <string_view>

namespace serried::detail {

/// A group's backend for one device. All tensors are contiguous; every call blocks until the result may be used.
class Transport {
 public:
  /// ValueError that lists the group's devices where none of its backends serves `x`'s.
  Transport(std::string_view where, const Group& group, const at::Tensor& x);
  /// For calls without a tensor.
  Transport(std::string_view where, const Group& group);

  void all_reduce(const at::Tensor& input, const at::Tensor& output, const c10d::ReduceOp& op) const;
  /// `whole` holds the pieces side by side, if it is defined.
  void all_gather(const std::vector<at::Tensor>& pieces, const at::Tensor& input, const at::Tensor& whole) const;
  void reduce_scatter(const at::Tensor& output, const std::vector<at::Tensor>& pieces, const c10d::ReduceOp& op) const;
  void all_to_all(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs) const;
  /// Equal pieces in a row.
  void all_gather_flat(const at::Tensor& output, const at::Tensor& input) const;
  void reduce_scatter_flat(const at::Tensor& output, const at::Tensor& input, const c10d::ReduceOp& op) const;
  void all_to_all_flat(const at::Tensor& output, const at::Tensor& input) const;
  void broadcast(const at::Tensor& x, int64_t src) const;
  void send(const at::Tensor& x, int64_t peer, int64_t tag) const;
  void recv(const at::Tensor& x, int64_t peer, int64_t tag) const;
  void barrier() const;

 private:
  template <class Start>
  void finish(Start start) const;

  std::string_view where_;
  c10::intrusive_ptr<c10d::Backend> backend_;
  DirectCollectives* direct_;  // null: the backend only knows c10d's way
};

}  // namespace serried::detail
