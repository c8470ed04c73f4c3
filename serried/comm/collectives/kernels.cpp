// The collectives' kernels: make tensors contiguous, lay out pieces, call the transport.
#include <ATen/ATen.h>

#include <algorithm>

#include "serried/base/error.h"
#include "serried/comm/collectives/cut.h"
#include "serried/comm/collectives/ops.h"
#include "serried/comm/collectives/started.h"
#include "serried/comm/collectives/transport.h"

namespace serried::detail {
namespace {

at::Tensor copy_of(const at::Tensor& x) {
  return x.clone(at::MemoryFormat::Contiguous);
}

// One rank alone: every collective is the identity, but for the factor of PREMUL_SUM.
bool is_identity(const Group& group, const ReduceOpPtr& op) {
  return group->getSize() == 1 && op->op_ != c10d::ReduceOp::PREMUL_SUM;
}

std::vector<at::Tensor> cut_pieces(const at::Tensor& x, int64_t dim, at::IntArrayRef sizes) {
  std::vector<at::Tensor> pieces;
  pieces.reserve(sizes.size());
  int64_t begin = 0;
  for (int64_t size : sizes) {
    pieces.push_back(x.narrow(dim, begin, size).contiguous());
    begin += size;
  }
  return pieces;
}

// A result that arrives in pieces along `dim`: in place where the pieces lie contiguous in it, else joined afterwards.
class Pieces {
 public:
  Pieces(const at::Tensor& whole, int64_t dim, at::IntArrayRef sizes) : whole_(whole), dim_(dim) {
    const at::IntArrayRef before = whole.sizes().slice(0, dim);
    in_place_ = std::all_of(before.begin(), before.end(), [](int64_t size) { return size == 1; });
    int64_t begin = 0;
    for (int64_t size : sizes) {
      pieces_.push_back(in_place_ ? whole.narrow(dim, begin, size)
                                  : at::empty(with_size(whole.sizes(), dim, size), whole.options()));
      begin += size;
    }
  }

  const std::vector<at::Tensor>& list() const { return pieces_; }
  /// Undefined where the pieces are apart.
  at::Tensor block() const { return in_place_ ? whole_ : at::Tensor(); }

  void join() {
    if (!in_place_) at::cat_out(whole_, pieces_, dim_);
  }

 private:
  at::Tensor whole_;
  int64_t dim_;
  bool in_place_;
  std::vector<at::Tensor> pieces_;
};

// Gives `call` a contiguous tensor to write, and puts the result where it belongs.
template <class Call>
void write_through(const at::Tensor& x, Call call) {
  if (x.is_contiguous()) return call(x);
  const at::Tensor dense = x.contiguous();
  call(dense);
  x.copy_(dense);
}

}  // namespace

namespace device {

at::Tensor all_reduce(const at::Tensor& x, const Group& group, const ReduceOpPtr& op) {
  const Started started("all_reduce", x, group);
  const Transport transport("all_reduce", group, x);
  if (is_identity(group, op)) return copy_of(x);
  at::Tensor result = at::empty(x.sizes(), x.options());
  transport.all_reduce(x.contiguous(), result, *op);
  return result;
}

void all_reduce_(const at::Tensor& x, const Group& group, const ReduceOpPtr& op) {
  const Started started("all_reduce", x, group);
  const Transport transport("all_reduce_", group, x);
  if (is_identity(group, op)) return;
  write_through(x, [&](const at::Tensor& dense) { transport.all_reduce(dense, dense, *op); });
}

at::Tensor all_gather(const at::Tensor& x, const Group& group, int64_t dim, at::IntArrayRef sizes) {
  const Started started("all_gather", x, group);
  const Transport transport("all_gather", group, x);
  if (group->getSize() == 1) return copy_of(x);
  const at::Tensor result = at::empty(gathered_shape(x, dim, sizes), x.options());
  Pieces pieces(result, dim, sizes);
  transport.all_gather(pieces.list(), x.contiguous(), pieces.block());
  pieces.join();
  return result;
}

at::Tensor reduce_scatter(const at::Tensor& x, const Group& group, int64_t dim, at::IntArrayRef sizes,
                          const ReduceOpPtr& op) {
  const Started started("reduce_scatter", x, group);
  const Transport transport("reduce_scatter", group, x);
  if (is_identity(group, op)) return copy_of(x);
  const at::Tensor result = at::empty(scattered_shape(x, group->getRank(), dim, sizes), x.options());
  transport.reduce_scatter(result, cut_pieces(x, dim, sizes), *op);
  return result;
}

at::Tensor all_to_all(const at::Tensor& x, const Group& group, int64_t split_dim, int64_t concat_dim,
                      at::IntArrayRef split_sizes, at::IntArrayRef concat_sizes) {
  const Started started("all_to_all", x, group);
  const Transport transport("all_to_all", group, x);
  if (group->getSize() == 1) return copy_of(x);
  const at::Tensor result =
      at::empty(exchanged_shape(x, group->getRank(), split_dim, concat_dim, split_sizes, concat_sizes), x.options());
  Pieces pieces(result, concat_dim, concat_sizes);
  transport.all_to_all(pieces.list(), cut_pieces(x, split_dim, split_sizes));
  pieces.join();
  return result;
}

at::Tensor broadcast(const at::Tensor& x, const Group& group, int64_t src) {
  const Started started("broadcast", x, group);
  const Transport transport("broadcast", group, x);
  at::Tensor result = group->getRank() == src ? copy_of(x) : at::empty(x.sizes(), x.options());
  if (group->getSize() > 1) transport.broadcast(result, src);
  return result;
}

void broadcast_(const at::Tensor& x, const Group& group, int64_t src) {
  const Started started("broadcast", x, group);
  const Transport transport("broadcast_", group, x);
  if (group->getSize() == 1) return;
  write_through(x, [&](const at::Tensor& dense) { transport.broadcast(dense, src); });
}

at::Tensor reduce(const at::Tensor& x, const Group& group, int64_t dst) {
  const Started started("reduce", x, group);
  const Transport transport("reduce", group, x);
  if (group->getSize() == 1) return copy_of(x);
  at::Tensor result = at::empty(x.sizes(), x.options());
  transport.all_reduce(x.contiguous(), result, c10d::ReduceOp(c10d::ReduceOp::SUM));
  if (group->getRank() != dst) result.zero_();
  return result;
}

void send(const at::Tensor& x, const Group& group, int64_t peer, int64_t tag) {
  const Started started("send", x, group);
  Transport("send", group, x).send(x.contiguous(), peer, tag);
}

void recv_(const at::Tensor& x, const Group& group, int64_t peer, int64_t tag) {
  const Started started("recv", x, group);
  const Transport transport("recv", group, x);
  write_through(x, [&](const at::Tensor& dense) { transport.recv(dense, peer, tag); });
}

void barrier(const Group& group) {
  const Started started("barrier", -1, group);
  const Transport transport("barrier", group);
  if (group->getSize() > 1) transport.barrier();
}

}  // namespace device
}  // namespace serried::detail
