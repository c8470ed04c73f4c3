// Schemas of the collectives, and the calls through the dispatcher.
#include "serried/comm/collectives/ops.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <array>

namespace serried::detail {
namespace {

// The group travels as c10d's own ops pass it; a recorder can read its name.
#define SERRIED_GROUP "__torch__.torch.classes.c10d.ProcessGroup group"
#define SERRIED_OP "__torch__.torch.classes.c10d.ReduceOp op"

TORCH_LIBRARY(serried, m) {
  m.def("all_gather(Tensor x, " SERRIED_GROUP ", int dim, int[] sizes) -> Tensor");
  m.def("all_reduce(Tensor x, " SERRIED_GROUP ", " SERRIED_OP ") -> Tensor");
  m.def("all_reduce_(Tensor(a!) x, " SERRIED_GROUP ", " SERRIED_OP ") -> ()");
  m.def("all_to_all(Tensor x, " SERRIED_GROUP
        ", int split_dim, int concat_dim, int[] split_sizes, int[] concat_sizes) -> Tensor");
  m.def("barrier(" SERRIED_GROUP ") -> ()");
  m.def("broadcast(Tensor x, " SERRIED_GROUP ", int src) -> Tensor");
  m.def("broadcast_(Tensor(a!) x, " SERRIED_GROUP ", int src) -> ()");
  m.def("recv_(Tensor(a!) x, " SERRIED_GROUP ", int peer, int tag) -> ()");
  m.def("reduce(Tensor x, " SERRIED_GROUP ", int dst) -> Tensor");
  m.def("reduce_scatter(Tensor x, " SERRIED_GROUP ", int dim, int[] sizes, " SERRIED_OP ") -> Tensor");
  m.def("send(Tensor x, " SERRIED_GROUP ", int peer, int tag) -> ()");
}

#undef SERRIED_GROUP
#undef SERRIED_OP

// Any device that the group serves, and barrier, which has no tensor to dispatch on.
TORCH_LIBRARY_IMPL(serried, CompositeExplicitAutograd, m) {
  m.impl("all_gather", device::all_gather);
  m.impl("all_reduce", device::all_reduce);
  m.impl("all_reduce_", device::all_reduce_);
  m.impl("all_to_all", device::all_to_all);
  m.impl("barrier", device::barrier);
  m.impl("broadcast", device::broadcast);
  m.impl("broadcast_", device::broadcast_);
  m.impl("recv_", device::recv_);
  m.impl("reduce", device::reduce);
  m.impl("reduce_scatter", device::reduce_scatter);
  m.impl("send", device::send);
}

template <class Signature>
c10::TypedOperatorHandle<Signature> find(const char* name, Signature*) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

}  // namespace

ReduceOpPtr share(const c10d::ReduceOp& op) {
  static const std::array<ReduceOpPtr, c10d::ReduceOp::PREMUL_SUM> plain = [] {
    std::array<ReduceOpPtr, c10d::ReduceOp::PREMUL_SUM> all;
    for (size_t i = 0; i < all.size(); ++i) {
      all[i] = c10::make_intrusive<c10d::ReduceOp>(c10d::ReduceOp::RedOpType(i));
    }
    return all;
  }();
  if (op.op_ < plain.size()) return plain[op.op_];
  return c10::make_intrusive<c10d::ReduceOp>(op);
}

namespace ops {

at::Tensor all_reduce(const at::Tensor& x, const Group& group, const ReduceOpPtr& op) {
  static const auto handle = find("serried::all_reduce", device::all_reduce);
  return handle.call(x, group, op);
}

at::Tensor all_gather(const at::Tensor& x, const Group& group, int64_t dim, at::IntArrayRef sizes) {
  static const auto handle = find("serried::all_gather", device::all_gather);
  return handle.call(x, group, dim, sizes);
}

at::Tensor reduce_scatter(const at::Tensor& x, const Group& group, int64_t dim, at::IntArrayRef sizes,
                          const ReduceOpPtr& op) {
  static const auto handle = find("serried::reduce_scatter", device::reduce_scatter);
  return handle.call(x, group, dim, sizes, op);
}

at::Tensor all_to_all(const at::Tensor& x, const Group& group, int64_t split_dim, int64_t concat_dim,
                      at::IntArrayRef split_sizes, at::IntArrayRef concat_sizes) {
  static const auto handle = find("serried::all_to_all", device::all_to_all);
  return handle.call(x, group, split_dim, concat_dim, split_sizes, concat_sizes);
}

at::Tensor broadcast(const at::Tensor& x, const Group& group, int64_t src) {
  static const auto handle = find("serried::broadcast", device::broadcast);
  return handle.call(x, group, src);
}

at::Tensor reduce(const at::Tensor& x, const Group& group, int64_t dst) {
  static const auto handle = find("serried::reduce", device::reduce);
  return handle.call(x, group, dst);
}

void all_reduce_(const at::Tensor& x, const Group& group, const ReduceOpPtr& op) {
  static const auto handle = find("serried::all_reduce_", device::all_reduce_);
  handle.call(x, group, op);
}

void broadcast_(const at::Tensor& x, const Group& group, int64_t src) {
  static const auto handle = find("serried::broadcast_", device::broadcast_);
  handle.call(x, group, src);
}

void send(const at::Tensor& x, const Group& group, int64_t peer, int64_t tag) {
  static const auto handle = find("serried::send", device::send);
  handle.call(x, group, peer, tag);
}

void recv_(const at::Tensor& x, const Group& group, int64_t peer, int64_t tag) {
  static const auto handle = find("serried::recv_", device::recv_);
  handle.call(x, group, peer, tag);
}

void barrier(const Group& group) {
  static const auto handle = find("serried::barrier", device::barrier);
  handle.call(group);
}

}  // namespace ops
}  // namespace serried::detail
