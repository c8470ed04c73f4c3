// all_reduce: sums and other reductions over the ranks, on every rank.
#include <ATen/ops/empty.h>

#include "serried/comm/collectives/async.h"
#include "serried/comm/collectives/checks.h"
#include "serried/comm/collectives/collectives.h"
#include "serried/comm/collectives/op.h"
#include "serried/comm/collectives/ops.h"
#include "serried/comm/collectives/pending.h"

namespace serried {
namespace detail {
namespace {

Collective reduction(const char* where, const at::Tensor& input, const at::Tensor& output, const ReduceOpPtr& op,
                     TimeoutMs timeout) {
  return {.kind = watch::Kind::all_reduce,
          .where = where,
          .inputs = input,
          .outputs = output,
          .op = op.get(),
          .timeout = in_milliseconds(timeout)};
}

struct AllReduce {
  static constexpr const char* kName = "all_reduce";
  static constexpr const char* kArguments = "__torch__.torch.classes.c10d.ReduceOp op";

  static at::Tensor kernel(const at::Tensor& x, const Group& group, const ReduceOpPtr& op, TimeoutMs timeout,
                           WorkPtr* started) {
    // What is on its way is a copy: its caller goes on with `x`.
    const at::Tensor result =
        started != nullptr ? x.clone(at::MemoryFormat::Contiguous) : at::empty(x.sizes(), x.options());
    const at::Tensor input = started != nullptr ? result : x.contiguous();
    carry_out(group, reduction(kName, input, result, op, timeout), started);
    return result;
  }
  static at::Tensor meta(const at::Tensor& x, const Group&, const ReduceOpPtr&) {
    return at::empty(x.sizes(), x.options());
  }
  static void save(AutogradContext* ctx, const ReduceOpPtr& op) { ctx->saved_data["op"] = int64_t(op->op_); }
  static at::Tensor backward(AutogradContext* ctx, const Group& group, const at::Tensor& grad) {
    return ops::all_reduce(grad, group, share(differentiable_op(ctx, kName)));
  }
};

struct AllReduceInPlace {
  static constexpr const char* kName = "all_reduce_";
  static constexpr bool kWrites = true;
  static constexpr const char* kArguments =
      "Tensor(a!) x, __torch__.torch.classes.c10d.ProcessGroup group, __torch__.torch.classes.c10d.ReduceOp op";

  static void kernel(const at::Tensor& x, const Group& group, const ReduceOpPtr& op, TimeoutMs timeout,
                     WorkPtr* started) {
    write_through(x, [&](const at::Tensor& dense, std::function<void()> after) {
      carry_out(group, reduction(kName, dense, dense, op, timeout), started, std::move(after));
    });
  }
  static void refuse_gradient(const at::Tensor& x, const Group&, const ReduceOpPtr&) {
    refuse_gradient_in_place(x, kName, "use the functional form: y = all_reduce(x, group)");
  }
};

using AllReduceOp = FunctionalOp<AllReduce, const ReduceOpPtr&>;
using AllReduceInPlaceOp = PlainOp<AllReduceInPlace, const Group&, const ReduceOpPtr&>;

TORCH_LIBRARY_FRAGMENT(serried, m) {
  AllReduceOp::define(m);
  AllReduceInPlaceOp::define(m);
}

TORCH_LIBRARY_IMPL(serried, CompositeExplicitAutograd, m) {
  AllReduceOp::on_devices(m);
  AllReduceInPlaceOp::on_devices(m);
}

TORCH_LIBRARY_IMPL(serried, Meta, m) {
  AllReduceOp::on_meta(m);
  AllReduceInPlaceOp::on_meta(m);
}

TORCH_LIBRARY_IMPL(serried, Autograd, m) {
  AllReduceOp::on_autograd(m);
  AllReduceInPlaceOp::on_autograd(m);
}

TORCH_LIBRARY_IMPL(serried, ADInplaceOrView, m) {
  AllReduceInPlaceOp::on_version_count(m);
}

// What the op takes of a user's options.
struct Checked {
  ReduceOpPtr op;
  TimeoutMs timeout;
};

Checked checked(const char* where, const at::Tensor& x, const Group& group, const AllReduceOptions& options) {
  check_call(where, x, group);
  check_op(where, options.op, x);
  return {share(options.op), checked_timeout(where, options.timeout)};
}

}  // namespace

at::Tensor ops::all_reduce(const at::Tensor& x, const Group& group, const ReduceOpPtr& op, WorkPtr* started) {
  return AllReduceOp::call_or_start(x, group, op, {}, started);
}

void ops::all_reduce_(const at::Tensor& x, const Group& group, const ReduceOpPtr& op, WorkPtr* started) {
  AllReduceInPlaceOp::call_or_start(x, group, op, {}, started);
}

WorkPtr ops::start_all_reduce_(const at::Tensor& x, const Group& group, const ReduceOpPtr& op) {
  at::AutoDispatchBelowADInplaceOrView below;
  if (x.layout() == at::kStrided) return AllReduceInPlaceOp::start(x, group, op, {});
  std::vector<at::Tensor> tensors{x};
  c10d::AllreduceOptions options;
  options.reduceOp = *op;
  return group->allreduce(tensors, options);
}

}  // namespace detail

at::Tensor all_reduce(const at::Tensor& x, const Group& group, AllReduceOptions options) {
  const auto [op, timeout] = detail::checked("all_reduce", x, group, options);
  return detail::AllReduceOp::call(x, group, op, timeout);
}

at::Tensor all_reduce(const at::Tensor& x, const Group& group, const Reduction& op) {
  return all_reduce(x, group, AllReduceOptions{.op = op});
}

void all_reduce_(const at::Tensor& x, const Group& group, AllReduceOptions options) {
  const auto [op, timeout] = detail::checked("all_reduce_", x, group, options);
  detail::AllReduceInPlaceOp::call(x, group, op, timeout);
}

void all_reduce_(const at::Tensor& x, const Group& group, const Reduction& op) {
  all_reduce_(x, group, AllReduceOptions{.op = op});
}

Pending async::all_reduce(const at::Tensor& x, const Group& group, AllReduceOptions options) {
  const auto [op, timeout] = detail::checked("all_reduce", x, group, options);
  return detail::pending(detail::AllReduceOp::start(x, group, op, timeout));
}

Pending async::all_reduce(const at::Tensor& x, const Group& group, const Reduction& op) {
  return async::all_reduce(x, group, AllReduceOptions{.op = op});
}

Pending async::all_reduce_(const at::Tensor& x, const Group& group, AllReduceOptions options) {
  const auto [op, timeout] = detail::checked("all_reduce_", x, group, options);
  return detail::pending({x, detail::AllReduceInPlaceOp::start(x, group, op, timeout)}, {}, "all_reduce_");
}

Pending async::all_reduce_(const at::Tensor& x, const Group& group, const Reduction& op) {
  return async::all_reduce_(x, group, AllReduceOptions{.op = op});
}

}  // namespace serried
