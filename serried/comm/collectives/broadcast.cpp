// broadcast: one rank's tensor on every rank.
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

// Only the source puts something in.
Collective sending(const char* where, const at::Tensor& x, const Group& group, int64_t src, TimeoutMs timeout) {
  return {.kind = watch::Kind::broadcast,
          .where = where,
          .inputs = group->getRank() == src ? at::TensorList(x) : at::TensorList(),
          .outputs = x,
          .root = int(src),
          .timeout = in_milliseconds(timeout)};
}

struct Broadcast {
  static constexpr const char* kName = "broadcast";
  static constexpr const char* kArguments = "int src";

  static at::Tensor kernel(const at::Tensor& x, const Group& group, int64_t src, TimeoutMs timeout, WorkPtr* started) {
    const at::Tensor result =
        group->getRank() == src ? x.clone(at::MemoryFormat::Contiguous) : at::empty(x.sizes(), x.options());
    carry_out(group, sending(kName, result, group, src, timeout), started);
    return result;
  }
  static at::Tensor meta(const at::Tensor& x, const Group&, int64_t) { return at::empty(x.sizes(), x.options()); }
  static void save(AutogradContext* ctx, int64_t src) { ctx->saved_data["src"] = src; }
  static at::Tensor backward(AutogradContext* ctx, const Group& group, const at::Tensor& grad) {
    return ops::reduce(grad, group, ctx->saved_data["src"].toInt(), share(c10d::ReduceOp::SUM));
  }
};

struct BroadcastInPlace {
  static constexpr const char* kName = "broadcast_";
  static constexpr bool kWrites = true;
  static constexpr const char* kArguments = "Tensor(a!) x, __torch__.torch.classes.c10d.ProcessGroup group, int src";

  static void kernel(const at::Tensor& x, const Group& group, int64_t src, TimeoutMs timeout, WorkPtr* started) {
    write_through(x, [&](const at::Tensor& dense, std::function<void()> after) {
      carry_out(group, sending(kName, dense, group, src, timeout), started, std::move(after));
    });
  }
  static void refuse_gradient(const at::Tensor& x, const Group&, int64_t) {
    refuse_gradient_in_place(x, kName, "use the functional form: y = broadcast(x, group)");
  }
};

using BroadcastOp = FunctionalOp<Broadcast, int64_t>;
using BroadcastInPlaceOp = PlainOp<BroadcastInPlace, const Group&, int64_t>;

TORCH_LIBRARY_FRAGMENT(serried, m) {
  BroadcastOp::define(m);
  BroadcastInPlaceOp::define(m);
}

TORCH_LIBRARY_IMPL(serried, CompositeExplicitAutograd, m) {
  BroadcastOp::on_devices(m);
  BroadcastInPlaceOp::on_devices(m);
}

TORCH_LIBRARY_IMPL(serried, Meta, m) {
  BroadcastOp::on_meta(m);
  BroadcastInPlaceOp::on_meta(m);
}

TORCH_LIBRARY_IMPL(serried, Autograd, m) {
  BroadcastOp::on_autograd(m);
  BroadcastInPlaceOp::on_autograd(m);
}

TORCH_LIBRARY_IMPL(serried, ADInplaceOrView, m) {
  BroadcastInPlaceOp::on_version_count(m);
}

TimeoutMs checked(const char* where, const at::Tensor& x, const Group& group, const BroadcastOptions& options) {
  check_call(where, x, group);
  check_rank(where, "src", options.src, group);
  return checked_timeout(where, options.timeout);
}

}  // namespace

at::Tensor ops::broadcast(const at::Tensor& x, const Group& group, int64_t src) {
  return BroadcastOp::call(x, group, src, {});
}

WorkPtr ops::start_broadcast_(const at::Tensor& x, const Group& group, int64_t src) {
  at::AutoDispatchBelowADInplaceOrView below;
  return BroadcastInPlaceOp::start(x, group, src, {});
}

}  // namespace detail

at::Tensor broadcast(const at::Tensor& x, const Group& group, BroadcastOptions options) {
  const auto timeout = detail::checked("broadcast", x, group, options);
  return detail::BroadcastOp::call(x, group, options.src, timeout);
}

void broadcast_(const at::Tensor& x, const Group& group, BroadcastOptions options) {
  const auto timeout = detail::checked("broadcast_", x, group, options);
  detail::BroadcastInPlaceOp::call(x, group, options.src, timeout);
}

Pending async::broadcast(const at::Tensor& x, const Group& group, BroadcastOptions options) {
  const auto timeout = detail::checked("broadcast", x, group, options);
  return detail::pending(detail::BroadcastOp::start(x, group, options.src, timeout));
}

Pending async::broadcast_(const at::Tensor& x, const Group& group, BroadcastOptions options) {
  const auto timeout = detail::checked("broadcast_", x, group, options);
  return detail::pending({x, detail::BroadcastInPlaceOp::start(x, group, options.src, timeout)}, {}, "broadcast_");
}

}  // namespace serried
