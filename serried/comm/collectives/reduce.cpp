// reduce: a reduction over the ranks that only one of them gets.
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "serried/comm/collectives/async.h"
#include "serried/comm/collectives/checks.h"
#include "serried/comm/collectives/collectives.h"
#include "serried/comm/collectives/op.h"
#include "serried/comm/collectives/ops.h"
#include "serried/comm/collectives/pending.h"

namespace serried {
namespace detail {
namespace {

struct Reduce {
  static constexpr const char* kName = "reduce";
  static constexpr const char* kArguments = "int dst, __torch__.torch.classes.c10d.ReduceOp op";

  static at::Tensor kernel(const at::Tensor& x, const Group& group, int64_t dst, const ReduceOpPtr& op,
                           TimeoutMs timeout, WorkPtr* started) {
    const at::Tensor input = x.contiguous();
    const at::Tensor result = at::zeros(x.sizes(), x.options());
    const Collective reduction{.kind = watch::Kind::reduce,
                               .where = kName,
                               .inputs = input,
                               .outputs = result,
                               .op = op.get(),
                               .root = int(dst),
                               .timeout = in_milliseconds(timeout)};
    carry_out(group, reduction, started);
    return result;
  }
  static at::Tensor meta(const at::Tensor& x, const Group&, int64_t, const ReduceOpPtr&) {
    return at::empty(x.sizes(), x.options());
  }
  static void save(AutogradContext* ctx, int64_t dst, const ReduceOpPtr& op) {
    ctx->saved_data["dst"] = dst;
    ctx->saved_data["op"] = int64_t(op->op_);
  }
  static at::Tensor backward(AutogradContext* ctx, const Group& group, const at::Tensor& grad) {
    const bool is_average = differentiable_op(ctx, kName) == c10d::ReduceOp::AVG;
    return ops::broadcast(is_average ? grad / group->getSize() : grad, group, ctx->saved_data["dst"].toInt());
  }
};

using ReduceToRootOp = FunctionalOp<Reduce, int64_t, const ReduceOpPtr&>;

TORCH_LIBRARY_FRAGMENT(serried, m) {
  ReduceToRootOp::define(m);
}

TORCH_LIBRARY_IMPL(serried, CompositeExplicitAutograd, m) {
  ReduceToRootOp::on_devices(m);
}

TORCH_LIBRARY_IMPL(serried, Meta, m) {
  ReduceToRootOp::on_meta(m);
}

TORCH_LIBRARY_IMPL(serried, Autograd, m) {
  ReduceToRootOp::on_autograd(m);
}

// What the op takes of a user's options.
struct CheckedReduce {
  ReduceOpPtr op;
  TimeoutMs timeout;
};

CheckedReduce checked(const at::Tensor& x, const Group& group, const ReduceOptions& options) {
  constexpr const char* where = Reduce::kName;
  check_call(where, x, group);
  check_not_distributed(where, x);
  check_rank(where, "dst", options.dst, group);
  check_op(where, options.op, x);
  return {share(options.op), checked_timeout(where, options.timeout)};
}

}  // namespace

at::Tensor ops::reduce(const at::Tensor& x, const Group& group, int64_t dst, const ReduceOpPtr& op) {
  return ReduceToRootOp::call(x, group, dst, op, {});
}

}  // namespace detail

at::Tensor reduce(const at::Tensor& x, const Group& group, ReduceOptions options) {
  const auto [op, timeout] = detail::checked(x, group, options);
  return detail::ReduceToRootOp::call(x, group, options.dst, op, timeout);
}

Pending async::reduce(const at::Tensor& x, const Group& group, ReduceOptions options) {
  const auto [op, timeout] = detail::checked(x, group, options);
  return detail::pending(detail::ReduceToRootOp::start(x, group, options.dst, op, timeout), {"reduce", x});
}

}  // namespace serried
