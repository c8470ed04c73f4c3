// Collectives that return while they are on their way, as ops: a result and the Work to wait for before using it.
#include <ATen/ops/empty.h>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/library.h>

#include <tuple>

#include "serried/comm/collectives/cut.h"
#include "serried/comm/collectives/ops.h"
#include "serried/comm/collectives/started.h"

namespace serried::graph {
namespace {

using detail::ReduceOpPtr;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Pending = std::tuple<at::Tensor, WorkPtr>;

// Keeps what the backend reads and writes alive until somebody has waited.
class HoldingWork final : public c10d::Work {
 public:
  HoldingWork(WorkPtr inner, std::vector<at::Tensor> held) : inner_(std::move(inner)), held_(std::move(held)) {}
  ~HoldingWork() override {
    try {
      if (!held_.empty()) inner_->wait();
    } catch (const std::exception&) {
      // A run that failed drops its Works; it has raised already.
    }
  }

  bool wait(std::chrono::milliseconds timeout) override {
    const bool done = inner_->wait(timeout);
    held_.clear();
    return done;
  }
  bool isCompleted() override { return inner_->isCompleted(); }

 private:
  WorkPtr inner_;
  std::vector<at::Tensor> held_;
};

WorkPtr holding(const WorkPtr& work, std::vector<at::Tensor> held) {
  return c10::make_intrusive<HoldingWork>(work, std::move(held));
}

c10::intrusive_ptr<c10d::Backend> backend_of(const at::Tensor& x, const Group& group) {
  return group->getBackend(x.device().type());
}

WorkPtr start_all_reduce_(const at::Tensor& x, const Group& group, const ReduceOpPtr& op) {
  const detail::Started started("all_reduce", x, group);
  std::vector<at::Tensor> tensors{x};
  c10d::AllreduceOptions options;
  options.reduceOp = *op;
  return holding(backend_of(x, group)->allreduce(tensors, options), {x});
}

Pending start_all_reduce(const at::Tensor& x, const Group& group, const ReduceOpPtr& op) {
  const at::Tensor result = x.clone(at::MemoryFormat::Contiguous);
  return {result, start_all_reduce_(result, group, op)};
}

WorkPtr start_broadcast_(const at::Tensor& x, const Group& group, int64_t src) {
  const detail::Started started("broadcast", x, group);
  std::vector<at::Tensor> tensors{x};
  c10d::BroadcastOptions options;
  options.rootRank = src;
  return holding(backend_of(x, group)->broadcast(tensors, options), {x});
}

Pending start_broadcast(const at::Tensor& x, const Group& group, int64_t src) {
  const at::Tensor result =
      group->getRank() == src ? x.clone(at::MemoryFormat::Contiguous) : at::empty(x.sizes(), x.options());
  return {result, start_broadcast_(result, group, src)};
}

// Equal pieces along dim 0 only: those lie in the output as they come.
WorkPtr start_all_gather_into(const at::Tensor& output, const at::Tensor& x, const Group& group) {
  const detail::Started started("all_gather", x, group);
  at::Tensor to = output, from = x.contiguous();
  return holding(backend_of(x, group)->_allgather_base(to, from), {to, from});
}

Pending start_all_gather(const at::Tensor& x, const Group& group) {
  const at::Tensor result = at::empty(detail::with_size(x.sizes(), 0, x.size(0) * group->getSize()), x.options());
  return {result, start_all_gather_into(result, x, group)};
}

WorkPtr start_reduce_scatter_into(const at::Tensor& output, const at::Tensor& x, const Group& group,
                                  const ReduceOpPtr& op) {
  const detail::Started started("reduce_scatter", x, group);
  at::Tensor to = output, from = x.contiguous();
  c10d::ReduceScatterOptions options;
  options.reduceOp = *op;
  return holding(backend_of(x, group)->_reduce_scatter_base(to, from, options), {to, from});
}

Pending start_reduce_scatter(const at::Tensor& x, const Group& group, const ReduceOpPtr& op) {
  const at::Tensor result = at::empty(detail::with_size(x.sizes(), 0, x.size(0) / group->getSize()), x.options());
  return {result, start_reduce_scatter_into(result, x, group, op)};
}

WorkPtr start_exchange(const at::Tensor& output, const at::Tensor& x, const Group& group, std::vector<int64_t> received,
                       std::vector<int64_t> sent) {
  const detail::Started started("all_to_all", x, group);
  at::Tensor to = output, from = x.contiguous();
  return holding(backend_of(x, group)->alltoall_base(to, from, received, sent), {to, from});
}

WorkPtr start_all_to_all_into(const at::Tensor& output, const at::Tensor& x, const Group& group) {
  return start_exchange(output, x, group, {}, {});
}

// Pieces of any size along dim 0.
Pending start_all_to_all(const at::Tensor& x, const Group& group, at::IntArrayRef split_sizes,
                         at::IntArrayRef concat_sizes) {
  const at::Tensor result = at::empty(detail::with_size(x.sizes(), 0, detail::sum_of(concat_sizes)), x.options());
  return {result, start_exchange(result, x, group, concat_sizes.vec(), split_sizes.vec())};
}

#define SERRIED_START(name, tensors, more) \
  "start_" name "(" tensors ", __torch__.torch.classes.c10d.ProcessGroup group" more ") -> "
#define SERRIED_OP ", __torch__.torch.classes.c10d.ReduceOp op"
#define SERRIED_WORK "__torch__.torch.classes.c10d.Work"
#define SERRIED_PENDING "(Tensor, " SERRIED_WORK ")"
#define SERRIED_INTO "Tensor(a!) output, Tensor x"

TORCH_LIBRARY_FRAGMENT(serried, m) {
  m.def(SERRIED_START("all_gather", "Tensor x", "") SERRIED_PENDING);
  m.def(SERRIED_START("all_gather_into", SERRIED_INTO, "") SERRIED_WORK);
  m.def(SERRIED_START("all_reduce", "Tensor x", SERRIED_OP) SERRIED_PENDING);
  m.def(SERRIED_START("all_reduce_", "Tensor(a!) x", SERRIED_OP) SERRIED_WORK);
  m.def(SERRIED_START("all_to_all", "Tensor x", ", int[] split_sizes, int[] concat_sizes") SERRIED_PENDING);
  m.def(SERRIED_START("all_to_all_into", SERRIED_INTO, "") SERRIED_WORK);
  m.def(SERRIED_START("broadcast", "Tensor x", ", int src") SERRIED_PENDING);
  m.def(SERRIED_START("broadcast_", "Tensor(a!) x", ", int src") SERRIED_WORK);
  m.def(SERRIED_START("reduce_scatter", "Tensor x", SERRIED_OP) SERRIED_PENDING);
  m.def(SERRIED_START("reduce_scatter_into", SERRIED_INTO, SERRIED_OP) SERRIED_WORK);
}

#undef SERRIED_START
#undef SERRIED_OP
#undef SERRIED_WORK
#undef SERRIED_PENDING
#undef SERRIED_INTO

TORCH_LIBRARY_IMPL(serried, CompositeExplicitAutograd, m) {
  m.impl("start_all_gather", start_all_gather);
  m.impl("start_all_gather_into", start_all_gather_into);
  m.impl("start_all_reduce", start_all_reduce);
  m.impl("start_all_reduce_", start_all_reduce_);
  m.impl("start_all_to_all", start_all_to_all);
  m.impl("start_all_to_all_into", start_all_to_all_into);
  m.impl("start_broadcast", start_broadcast);
  m.impl("start_broadcast_", start_broadcast_);
  m.impl("start_reduce_scatter", start_reduce_scatter);
  m.impl("start_reduce_scatter_into", start_reduce_scatter_into);
}

}  // namespace
}  // namespace serried::graph
