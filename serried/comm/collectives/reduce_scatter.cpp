// reduce_scatter: each rank gets its piece of the reduction.
#include <ATen/ops/empty.h>

#include "serried/comm/collectives/async.h"
#include "serried/comm/collectives/checks.h"
#include "serried/comm/collectives/collectives.h"
#include "serried/comm/collectives/op.h"
#include "serried/comm/collectives/ops.h"
#include "serried/comm/collectives/pending.h"
#include "serried/comm/collectives/pieces.h"

namespace serried {
namespace detail {
namespace {

Collective reduction(const char* where, at::TensorList inputs, const at::Tensor& output, const ReduceOpPtr& op,
                     TimeoutMs timeout) {
  return {.kind = watch::Kind::reduce_scatter,
          .where = where,
          .inputs = inputs,
          .outputs = output,
          .op = op.get(),
          .timeout = in_milliseconds(timeout)};
}

struct ReduceScatter {
  static constexpr const char* kName = "reduce_scatter";
  static constexpr const char* kArguments = "int dim, int[] sizes, __torch__.torch.classes.c10d.ReduceOp op";

  static at::Tensor kernel(const at::Tensor& x, const Group& group, int64_t dim, at::IntArrayRef sizes,
                           const ReduceOpPtr& op, TimeoutMs timeout, WorkPtr* started) {
    const at::Tensor result = meta(x, group, dim, sizes, op);
    const std::vector<at::Tensor> pieces = cut_pieces(x, dim, sizes);
    Collective reducing = reduction(kName, pieces, result, op, timeout);
    reducing.sizes_of_all = watch::hash_sizes({dim, sizes});
    carry_out(group, reducing, started);
    return result;
  }
  static at::Tensor meta(const at::Tensor& x, const Group& group, int64_t dim, at::IntArrayRef sizes,
                         const ReduceOpPtr&) {
    return at::empty(with_size(x.sizes(), dim, sizes[group->getRank()]), x.options());
  }
  static void save(AutogradContext* ctx, int64_t dim, at::IntArrayRef sizes, const ReduceOpPtr& op) {
    ctx->saved_data["dim"] = dim;
    ctx->saved_data["sizes"] = sizes.vec();
    ctx->saved_data["op"] = int64_t(op->op_);
  }
  static at::Tensor backward(AutogradContext* ctx, const Group& group, const at::Tensor& grad) {
    // Scaled before it is gathered: the piece is the smaller tensor.
    const bool is_average = differentiable_op(ctx, kName) == c10d::ReduceOp::AVG;
    return ops::all_gather(is_average ? grad / group->getSize() : grad, group, ctx->saved_data["dim"].toInt(),
                           ctx->saved_data["sizes"].toIntVector());
  }
};

struct ReduceScatterInto {
  static constexpr const char* kName = "reduce_scatter_into";
  static constexpr bool kWrites = true;
  static constexpr const char* kArguments =
      "Tensor(a!) output, Tensor x, __torch__.torch.classes.c10d.ProcessGroup group, "
      "__torch__.torch.classes.c10d.ReduceOp op";

  static void kernel(const at::Tensor& output, const at::Tensor& x, const Group& group, const ReduceOpPtr& op,
                     TimeoutMs timeout, WorkPtr* started) {
    const at::Tensor input = x.contiguous();
    carry_out(group, reduction(kName, input, output, op, timeout), started);
  }
  static void refuse_gradient(const at::Tensor& output, const at::Tensor& x, const Group&, const ReduceOpPtr&) {
    refuse_gradient_into(output, x);
  }
};

using ReduceScatterOp = FunctionalOp<ReduceScatter, int64_t, at::IntArrayRef, const ReduceOpPtr&>;
using ReduceScatterIntoOp = PlainOp<ReduceScatterInto, const at::Tensor&, const Group&, const ReduceOpPtr&>;

TORCH_LIBRARY_FRAGMENT(serried, m) {
  ReduceScatterOp::define(m);
  ReduceScatterIntoOp::define(m);
}

TORCH_LIBRARY_IMPL(serried, CompositeExplicitAutograd, m) {
  ReduceScatterOp::on_devices(m);
  ReduceScatterIntoOp::on_devices(m);
}

TORCH_LIBRARY_IMPL(serried, Meta, m) {
  ReduceScatterOp::on_meta(m);
  ReduceScatterIntoOp::on_meta(m);
}

TORCH_LIBRARY_IMPL(serried, Autograd, m) {
  ReduceScatterOp::on_autograd(m);
  ReduceScatterIntoOp::on_autograd(m);
}

TORCH_LIBRARY_IMPL(serried, ADInplaceOrView, m) {
  ReduceScatterIntoOp::on_version_count(m);
}

// What the op takes of a user's options.
struct CheckedScatter {
  int64_t dim;
  std::vector<int64_t> sizes;
  ReduceOpPtr op;
  TimeoutMs timeout;
};

CheckedScatter checked(const at::Tensor& x, const Group& group, const ReduceScatterOptions& options) {
  constexpr const char* where = ReduceScatter::kName;
  check_call(where, x, group);
  check_not_distributed(where, x);
  check_op(where, options.op, x);
  const int64_t dim = checked_dim(where, "dim", x, options.dim);
  return {dim, shard_sizes(x.size(dim), group->getSize()), share(options.op), checked_timeout(where, options.timeout)};
}

void check_into(const at::Tensor& output, const at::Tensor& x, const Group& group, const Reduction& op) {
  constexpr const char* where = ReduceScatterInto::kName;
  check_call(where, x, group);
  check_not_distributed(where, x);
  check_op(where, op, x);
  check_divisible(where, x, group);
  check_output(where, output, x, x.numel() / group->getSize());
}

}  // namespace

at::Tensor ops::reduce_scatter(const at::Tensor& x, const Group& group, int64_t dim, at::IntArrayRef sizes,
                               const ReduceOpPtr& op, WorkPtr* started) {
  return ReduceScatterOp::call_or_start(x, group, dim, sizes, op, {}, started);
}

void ops::reduce_scatter_into(const at::Tensor& output, const at::Tensor& x, const Group& group, const ReduceOpPtr& op,
                              WorkPtr* started) {
  ReduceScatterIntoOp::call_or_start(output, x, group, op, {}, started);
}

}  // namespace detail

at::Tensor reduce_scatter(const at::Tensor& x, const Group& group, ReduceScatterOptions options) {
  const auto [dim, sizes, op, timeout] = detail::checked(x, group, options);
  return detail::ReduceScatterOp::call(x, group, dim, sizes, op, timeout);
}

void reduce_scatter_into(const at::Tensor& output, const at::Tensor& x, const Group& group, const Reduction& op) {
  detail::check_into(output, x, group, op);
  detail::ReduceScatterIntoOp::call(output, x, group, detail::share(op), {});
}

Pending async::reduce_scatter(const at::Tensor& x, const Group& group, ReduceScatterOptions options) {
  const auto [dim, sizes, op, timeout] = detail::checked(x, group, options);
  return detail::pending(detail::ReduceScatterOp::start(x, group, dim, sizes, op, timeout), {"reduce_scatter", x});
}

Pending async::reduce_scatter_into(const at::Tensor& output, const at::Tensor& x, const Group& group,
                                   const Reduction& op) {
  detail::check_into(output, x, group, op);
  return detail::pending({output, detail::ReduceScatterIntoOp::start(output, x, group, detail::share(op), {})},
                         {"reduce_scatter_into", x}, "reduce_scatter_into");
}

}  // namespace serried
