// send, recv and barrier.
#include "serried/comm/collectives/async.h"
#include "serried/comm/collectives/checks.h"
#include "serried/comm/collectives/collectives.h"
#include "serried/comm/collectives/op.h"
#include "serried/comm/collectives/pending.h"

namespace serried {
namespace detail {
namespace {

struct Send {
  static constexpr const char* kName = "send";
  static constexpr bool kWrites = false;
  static constexpr const char* kArguments =
      "Tensor x, __torch__.torch.classes.c10d.ProcessGroup group, int peer, int tag";

  static void kernel(const at::Tensor& x, const Group& group, int64_t peer, int64_t tag, TimeoutMs timeout,
                     WorkPtr* started) {
    const at::Tensor input = x.contiguous();
    const Collective sending{.kind = watch::Kind::send,
                             .where = kName,
                             .inputs = input,
                             .root = int(peer),
                             .tag = int(tag),
                             .timeout = in_milliseconds(timeout)};
    carry_out(group, sending, started);
  }
  static void refuse_gradient(const at::Tensor&, const Group&, int64_t, int64_t) {}  // the receiver's is its own
};

struct Receive {
  static constexpr const char* kName = "recv_";
  static constexpr bool kWrites = true;
  static constexpr const char* kArguments =
      "Tensor(a!) x, __torch__.torch.classes.c10d.ProcessGroup group, int peer, int tag";

  static void kernel(const at::Tensor& x, const Group& group, int64_t peer, int64_t tag, TimeoutMs timeout,
                     WorkPtr* started) {
    write_through(x, [&](const at::Tensor& dense, std::function<void()> after) {
      const Collective receiving{.kind = watch::Kind::recv,
                                 .where = "recv",
                                 .outputs = dense,
                                 .root = int(peer),
                                 .tag = int(tag),
                                 .timeout = in_milliseconds(timeout)};
      carry_out(group, receiving, started, std::move(after));
    });
  }
  static void refuse_gradient(const at::Tensor& x, const Group&, int64_t, int64_t) {
    refuse_gradient_in_place(x, "recv", "receive into a tensor that does not require grad");
  }
};

using ReceiveOp = PlainOp<Receive, const Group&, int64_t, int64_t>;
using SendOp = PlainOp<Send, const Group&, int64_t, int64_t>;

void meet(const Group& group, TimeoutMs timeout, WorkPtr* started) {
  const Collective barrier{.kind = watch::Kind::barrier, .where = "barrier", .timeout = in_milliseconds(timeout)};
  carry_out(group, barrier, started);
}

void run_barrier(const Group& group, TimeoutMs timeout) {
  meet(group, timeout, nullptr);
}

WorkPtr start_barrier(const Group& group, TimeoutMs timeout) {
  WorkPtr work;
  meet(group, timeout, &work);
  return work;
}

TORCH_LIBRARY_FRAGMENT(serried, m) {
  SendOp::define(m);
  ReceiveOp::define(m);
  m.def(schema_text("barrier", kGroupArgument, "()").c_str());
  m.def(schema_text("start_barrier", kGroupArgument, "__torch__.torch.classes.c10d.Work").c_str());
}

// A barrier has no tensor to dispatch on.
TORCH_LIBRARY_IMPL(serried, CompositeExplicitAutograd, m) {
  SendOp::on_devices(m);
  ReceiveOp::on_devices(m);
  m.impl("barrier", run_barrier);
  m.impl("start_barrier", start_barrier);
}

TORCH_LIBRARY_IMPL(serried, Meta, m) {
  SendOp::on_meta(m);
  ReceiveOp::on_meta(m);
}

TORCH_LIBRARY_IMPL(serried, Autograd, m) {
  SendOp::on_autograd(m);
  ReceiveOp::on_autograd(m);
}

TORCH_LIBRARY_IMPL(serried, ADInplaceOrView, m) {
  ReceiveOp::on_version_count(m);
}

TimeoutMs checked(const char* where, const at::Tensor& x, const Group& group, const PeerOptions& options) {
  check_call(where, x, group);
  check_not_distributed(where, x);
  check_peer(where, options.peer, options.tag, group);
  return checked_timeout(where, options.timeout);
}

}  // namespace
}  // namespace detail

void send(const at::Tensor& x, const Group& group, PeerOptions options) {
  const auto timeout = detail::checked("send", x, group, options);
  detail::SendOp::call(x, group, options.peer, options.tag, timeout);
}

void recv(const at::Tensor& x, const Group& group, PeerOptions options) {
  const auto timeout = detail::checked("recv", x, group, options);
  detail::ReceiveOp::call(x, group, options.peer, options.tag, timeout);
}

void barrier(const Group& group, BarrierOptions options) {
  detail::check_group("barrier", group);
  static const auto op = detail::find_op<void(const Group&, detail::TimeoutMs)>("barrier");
  op.call(group, detail::checked_timeout("barrier", options.timeout));
}

Pending async::send(const at::Tensor& x, const Group& group, PeerOptions options) {
  const auto timeout = detail::checked("send", x, group, options);
  return detail::pending({x, detail::SendOp::start(x, group, options.peer, options.tag, timeout)}, {"send", x});
}

Pending async::recv(const at::Tensor& x, const Group& group, PeerOptions options) {
  const auto timeout = detail::checked("recv", x, group, options);
  return detail::pending({x, detail::ReceiveOp::start(x, group, options.peer, options.tag, timeout)}, {}, "recv");
}

Pending async::barrier(const Group& group, BarrierOptions options) {
  detail::check_group("barrier", group);
  static const auto op = detail::find_op<detail::WorkPtr(const Group&, detail::TimeoutMs)>("start_barrier");
  return detail::pending({at::Tensor(), op.call(group, detail::checked_timeout("barrier", options.timeout))});
}

}  // namespace serried
