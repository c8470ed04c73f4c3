// Gradients of the collectives: those of the sum over ranks of their losses. Each backward calls the ops, so it has a
// gradient too.
#include <ATen/core/grad_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "serried/base/error.h"
#include "serried/comm/collectives/collectives.h"
#include "serried/comm/collectives/ops.h"
#include "serried/comm/collectives/watch.h"

namespace serried::detail {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;
using RedOpType = c10d::ReduceOp::RedOpType;

Group group_of(AutogradContext* ctx) {
  return ctx->saved_data["group"].toCustomClass<c10d::ProcessGroup>();
}

RedOpType differentiable_op(AutogradContext* ctx, std::string_view where) {
  const auto op = RedOpType(ctx->saved_data["op"].toInt());
  if (op == RedOpType::SUM || op == RedOpType::AVG) return op;
  raise<c10::NotImplementedError>(
      {where, "the reduction " + to_string(op) + " has no gradient",
       "reduce with sum or avg, or detach the input: " + std::string(where) + "(x.detach(), group, ...)"});
}

struct AllReduce : Function<AllReduce> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const Group& group, const ReduceOpPtr& op) {
    ctx->saved_data["group"] = group;
    ctx->saved_data["op"] = int64_t(op->op_);
    at::AutoDispatchBelowADInplaceOrView below;
    return ops::all_reduce(x, group, op);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const ReduceOpPtr op = share(differentiable_op(ctx, "all_reduce"));
    return {ops::all_reduce(grads[0], group_of(ctx), op), {}, {}};
  }
};

struct AllGather : Function<AllGather> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const Group& group, int64_t dim,
                            at::IntArrayRef sizes) {
    ctx->saved_data["group"] = group;
    ctx->saved_data["dim"] = dim;
    ctx->saved_data["sizes"] = sizes.vec();
    at::AutoDispatchBelowADInplaceOrView below;
    return ops::all_gather(x, group, dim, sizes);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto sizes = ctx->saved_data["sizes"].toIntVector();
    const int64_t dim = ctx->saved_data["dim"].toInt();
    return {ops::reduce_scatter(grads[0], group_of(ctx), dim, sizes, share(RedOpType::SUM)), {}, {}, {}};
  }
};

struct ReduceScatter : Function<ReduceScatter> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const Group& group, int64_t dim,
                            at::IntArrayRef sizes, const ReduceOpPtr& op) {
    ctx->saved_data["group"] = group;
    ctx->saved_data["dim"] = dim;
    ctx->saved_data["sizes"] = sizes.vec();
    ctx->saved_data["op"] = int64_t(op->op_);
    at::AutoDispatchBelowADInplaceOrView below;
    return ops::reduce_scatter(x, group, dim, sizes, op);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const RedOpType op = differentiable_op(ctx, "reduce_scatter");
    const Group group = group_of(ctx);
    const auto sizes = ctx->saved_data["sizes"].toIntVector();
    // Scaled before it is gathered: the piece is the smaller tensor.
    const at::Tensor grad = op == RedOpType::AVG ? grads[0] / group->getSize() : grads[0];
    return {ops::all_gather(grad, group, ctx->saved_data["dim"].toInt(), sizes), {}, {}, {}, {}};
  }
};

struct AllToAll : Function<AllToAll> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const Group& group, int64_t split_dim,
                            int64_t concat_dim, at::IntArrayRef split_sizes, at::IntArrayRef concat_sizes) {
    ctx->saved_data["group"] = group;
    ctx->saved_data["split_dim"] = split_dim;
    ctx->saved_data["concat_dim"] = concat_dim;
    ctx->saved_data["split_sizes"] = split_sizes.vec();
    ctx->saved_data["concat_sizes"] = concat_sizes.vec();
    at::AutoDispatchBelowADInplaceOrView below;
    return ops::all_to_all(x, group, split_dim, concat_dim, split_sizes, concat_sizes);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    auto& saved = ctx->saved_data;
    const at::Tensor grad =
        ops::all_to_all(grads[0], group_of(ctx), saved["concat_dim"].toInt(), saved["split_dim"].toInt(),
                        saved["concat_sizes"].toIntVector(), saved["split_sizes"].toIntVector());
    return {grad, {}, {}, {}, {}, {}};
  }
};

struct Broadcast : Function<Broadcast> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const Group& group, int64_t src) {
    ctx->saved_data["group"] = group;
    ctx->saved_data["src"] = src;
    at::AutoDispatchBelowADInplaceOrView below;
    return ops::broadcast(x, group, src);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    return {ops::reduce(grads[0], group_of(ctx), ctx->saved_data["src"].toInt()), {}, {}};
  }
};

struct Reduce : Function<Reduce> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const Group& group, int64_t dst) {
    ctx->saved_data["group"] = group;
    ctx->saved_data["dst"] = dst;
    at::AutoDispatchBelowADInplaceOrView below;
    return ops::reduce(x, group, dst);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    return {ops::broadcast(grads[0], group_of(ctx), ctx->saved_data["dst"].toInt()), {}, {}};
  }
};

bool needs_grad(const at::Tensor& x) {
  return c10::GradMode::is_enabled() && x.requires_grad();
}

// One per op: where no gradient is needed, straight to the kernel below.
template <class Fn, class... Args>
at::Tensor differentiable(at::Tensor (*call)(const at::Tensor&, const Group&, Args...), const at::Tensor& x,
                          const Group& group, Args... args) {
  if (needs_grad(x)) return Fn::apply(x, group, args...);
  at::AutoDispatchBelowADInplaceOrView below;
  return call(x, group, args...);
}

at::Tensor all_reduce(const at::Tensor& x, const Group& group, const ReduceOpPtr& op) {
  return differentiable<AllReduce, const ReduceOpPtr&>(ops::all_reduce, x, group, op);
}

at::Tensor all_gather(const at::Tensor& x, const Group& group, int64_t dim, at::IntArrayRef sizes) {
  return differentiable<AllGather>(ops::all_gather, x, group, dim, sizes);
}

at::Tensor reduce_scatter(const at::Tensor& x, const Group& group, int64_t dim, at::IntArrayRef sizes,
                          const ReduceOpPtr& op) {
  return differentiable<ReduceScatter, int64_t, at::IntArrayRef, const ReduceOpPtr&>(ops::reduce_scatter, x, group, dim,
                                                                                     sizes, op);
}

at::Tensor all_to_all(const at::Tensor& x, const Group& group, int64_t split_dim, int64_t concat_dim,
                      at::IntArrayRef split_sizes, at::IntArrayRef concat_sizes) {
  return differentiable<AllToAll>(ops::all_to_all, x, group, split_dim, concat_dim, split_sizes, concat_sizes);
}

at::Tensor broadcast(const at::Tensor& x, const Group& group, int64_t src) {
  return differentiable<Broadcast>(ops::broadcast, x, group, src);
}

at::Tensor reduce(const at::Tensor& x, const Group& group, int64_t dst) {
  return differentiable<Reduce>(ops::reduce, x, group, dst);
}

void refuse_grad(const at::Tensor& x, std::string_view where, const std::string& fix) {
  if (!needs_grad(x)) return;
  raise<c10::ValueError>({where,
                          watch::describe_tensor(x) + " requires grad, and writing into it in place has no gradient",
                          fix + ", or call it under torch::NoGradGuard"});
}

// The kernels of ADInplaceOrView: where the caller is already below autograd, the version still counts.
namespace counted {

void all_reduce_(const at::Tensor& x, const Group& group, const ReduceOpPtr& op) {
  at::AutoDispatchBelowADInplaceOrView below;
  ops::all_reduce_(x, group, op);
  torch::autograd::increment_version(x);
}

void broadcast_(const at::Tensor& x, const Group& group, int64_t src) {
  at::AutoDispatchBelowADInplaceOrView below;
  ops::broadcast_(x, group, src);
  torch::autograd::increment_version(x);
}

void recv_(const at::Tensor& x, const Group& group, int64_t peer, int64_t tag) {
  at::AutoDispatchBelowADInplaceOrView below;
  ops::recv_(x, group, peer, tag);
  torch::autograd::increment_version(x);
}

}  // namespace counted

void all_reduce_(const at::Tensor& x, const Group& group, const ReduceOpPtr& op) {
  refuse_grad(x, "all_reduce_", "use the functional form: y = all_reduce(x, group)");
  counted::all_reduce_(x, group, op);
}

void broadcast_(const at::Tensor& x, const Group& group, int64_t src) {
  refuse_grad(x, "broadcast_", "use the functional form: y = broadcast(x, group)");
  counted::broadcast_(x, group, src);
}

void recv_(const at::Tensor& x, const Group& group, int64_t peer, int64_t tag) {
  refuse_grad(x, "recv", "receive into a tensor that does not require grad");
  counted::recv_(x, group, peer, tag);
}

void send(const at::Tensor& x, const Group& group, int64_t peer, int64_t tag) {
  at::AutoDispatchBelowADInplaceOrView below;
  ops::send(x, group, peer, tag);
}

TORCH_LIBRARY_IMPL(serried, Autograd, m) {
  m.impl("all_gather", all_gather);
  m.impl("all_reduce", all_reduce);
  m.impl("all_reduce_", all_reduce_);
  m.impl("all_to_all", all_to_all);
  m.impl("broadcast", broadcast);
  m.impl("broadcast_", broadcast_);
  m.impl("recv_", recv_);
  m.impl("reduce", reduce);
  m.impl("reduce_scatter", reduce_scatter);
  m.impl("send", send);
}

TORCH_LIBRARY_IMPL(serried, ADInplaceOrView, m) {
  m.impl("all_reduce_", counted::all_reduce_);
  m.impl("broadcast_", counted::broadcast_);
  m.impl("recv_", counted::recv_);
}

}  // namespace
}  // namespace serried::detail
