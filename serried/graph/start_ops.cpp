// Collectives that return while they are on their way, as ops: a result and the Work to wait for before using it.
#include <ATen/ops/empty.h>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/library.h>

#include <functional>
#include <tuple>

#include "serried/comm/detail/ops.h"
#include "serried/comm/detail/started.h"

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

Pending holding(at::Tensor result, const WorkPtr& work, const at::Tensor& x) {
  return {result, c10::make_intrusive<HoldingWork>(work, std::vector<at::Tensor>{result, x})};
}

Pending start_all_reduce(const at::Tensor& x, const Group& group, const ReduceOpPtr& op) {
  const detail::Started started("all_reduce", x, group);
  std::vector<at::Tensor> tensors{x.clone(at::MemoryFormat::Contiguous)};
  c10d::AllreduceOptions options;
  options.reduceOp = *op;
  return holding(tensors[0], group->getBackend(x.device().type())->allreduce(tensors, options), x);
}

// Equal pieces along dim 0 only: those lie in the result as they come.
Pending start_all_gather(const at::Tensor& x, const Group& group) {
  const detail::Started started("all_gather", x, group);
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes.at(0) *= group->getSize();
  at::Tensor result = at::empty(sizes, x.options()), piece = x.contiguous();
  return holding(result, group->getBackend(x.device().type())->_allgather_base(result, piece), piece);
}

Pending start_reduce_scatter(const at::Tensor& x, const Group& group, const ReduceOpPtr& op) {
  const detail::Started started("reduce_scatter", x, group);
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes.at(0) /= group->getSize();
  at::Tensor result = at::empty(sizes, x.options()), pieces = x.contiguous();
  c10d::ReduceScatterOptions options;
  options.reduceOp = *op;
  return holding(result, group->getBackend(x.device().type())->_reduce_scatter_base(result, pieces, options), pieces);
}

#define SERRIED_START(name, more)                                                 \
  "start_" name "(Tensor x, __torch__.torch.classes.c10d.ProcessGroup group" more \
  ") -> "                                                                         \
  "(Tensor, __torch__.torch.classes.c10d.Work)"
#define SERRIED_OP ", __torch__.torch.classes.c10d.ReduceOp op"

TORCH_LIBRARY_FRAGMENT(serried, m) {
  m.def(SERRIED_START("all_gather", ""));
  m.def(SERRIED_START("all_reduce", SERRIED_OP));
  m.def(SERRIED_START("reduce_scatter", SERRIED_OP));
}

#undef SERRIED_START
#undef SERRIED_OP

TORCH_LIBRARY_IMPL(serried, CompositeExplicitAutograd, m) {
  m.impl("start_all_gather", start_all_gather);
  m.impl("start_all_reduce", start_all_reduce);
  m.impl("start_reduce_scatter", start_reduce_scatter);
}

}  // namespace
}  // namespace serried::graph
