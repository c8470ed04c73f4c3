// all_gather: everybody's tensors side by side.
#include <ATen/ops/empty.h>

#include "serried/comm/collectives/async.h"
#include "serried/comm/collectives/checks.h"
#include "serried/comm/collectives/collectives.h"
#include "serried/comm/collectives/op.h"
#include "serried/comm/collectives/ops.h"
#include "serried/comm/collectives/pending.h"
#include "serried/comm/collectives/piece_sizes.h"
#include "serried/comm/collectives/pieces.h"

namespace serried {
namespace detail {
namespace {

struct AllGather {
  static constexpr const char* kName = "all_gather";
  static constexpr const char* kArguments = "int dim, int[] sizes";

  static at::Tensor kernel(const at::Tensor& x, const Group& group, int64_t dim, at::IntArrayRef sizes,
                           TimeoutMs timeout, WorkPtr* started) {
    const at::Tensor input = x.contiguous();
    const at::Tensor result = meta(x, group, dim, sizes);
    const ArrivingPieces pieces(result, dim, sizes);
    const Collective gather{.kind = watch::Kind::all_gather,
                            .where = kName,
                            .inputs = input,
                            .outputs = pieces.outputs(),
                            .timeout = in_milliseconds(timeout),
                            .sizes_of_all = watch::hash_sizes({dim, sizes, with_size(x.sizes(), dim, 0)})};
    carry_out(group, gather, started, pieces.what_is_left());
    return result;
  }
  static at::Tensor meta(const at::Tensor& x, const Group&, int64_t dim, at::IntArrayRef sizes) {
    return at::empty(with_size(x.sizes(), dim, sum_of(sizes)), x.options());
  }
  static void save(AutogradContext* ctx, int64_t dim, at::IntArrayRef sizes) {
    ctx->saved_data["dim"] = dim;
    ctx->saved_data["sizes"] = sizes.vec();
  }
  static at::Tensor backward(AutogradContext* ctx, const Group& group, const at::Tensor& grad) {
    return ops::reduce_scatter(grad, group, ctx->saved_data["dim"].toInt(), ctx->saved_data["sizes"].toIntVector(),
                               share(c10d::ReduceOp::SUM));
  }
};

struct AllGatherInto : MovingInto {
  static constexpr const char* kName = "all_gather_into";

  static void kernel(const at::Tensor& output, const at::Tensor& x, const Group& group, TimeoutMs timeout,
                     WorkPtr* started) {
    move_into(watch::Kind::all_gather, kName, output, x, group, timeout, started);
  }
};

using AllGatherOp = FunctionalOp<AllGather, int64_t, at::IntArrayRef>;
using AllGatherIntoOp = PlainOp<AllGatherInto, const at::Tensor&, const Group&>;

TORCH_LIBRARY_FRAGMENT(serried, m) {
  AllGatherOp::define(m);
  AllGatherIntoOp::define(m);
}

TORCH_LIBRARY_IMPL(serried, CompositeExplicitAutograd, m) {
  AllGatherOp::on_devices(m);
  AllGatherIntoOp::on_devices(m);
}

TORCH_LIBRARY_IMPL(serried, Meta, m) {
  AllGatherOp::on_meta(m);
  AllGatherIntoOp::on_meta(m);
}

TORCH_LIBRARY_IMPL(serried, Autograd, m) {
  AllGatherOp::on_autograd(m);
  AllGatherIntoOp::on_autograd(m);
}

TORCH_LIBRARY_IMPL(serried, ADInplaceOrView, m) {
  AllGatherIntoOp::on_version_count(m);
}

}  // namespace

at::Tensor ops::all_gather(const at::Tensor& x, const Group& group, int64_t dim, at::IntArrayRef sizes,
                           WorkPtr* started) {
  return AllGatherOp::call_or_start(x, group, dim, sizes, {}, started);
}

void ops::all_gather_into(const at::Tensor& output, const at::Tensor& x, const Group& group, WorkPtr* started) {
  AllGatherIntoOp::call_or_start(output, x, group, {}, started);
}

}  // namespace detail

at::Tensor all_gather(const at::Tensor& x, const Group& group, AllGatherOptions options) {
  detail::check_call("all_gather", x, group);
  const int64_t dim = detail::checked_dim("all_gather", "dim", x, options.dim);
  const auto timeout = detail::checked_timeout("all_gather", options.timeout);
  const std::vector<int64_t> sizes = detail::GatherSizes(x, group, dim, timeout, /*now=*/true).get();
  return detail::AllGatherOp::call(x, group, dim, sizes, timeout);
}

void all_gather_into(const at::Tensor& output, const at::Tensor& x, const Group& group) {
  detail::check_call("all_gather_into", x, group);
  detail::check_output("all_gather_into", output, x, x.numel() * group->getSize());
  detail::AllGatherIntoOp::call(output, x, group, {});
}

Pending async::all_gather(const at::Tensor& x, const Group& group, AllGatherOptions options) {
  detail::check_call("all_gather", x, group);
  const int64_t dim = detail::checked_dim("all_gather", "dim", x, options.dim);
  const auto timeout = detail::checked_timeout("all_gather", options.timeout);
  auto sizes = std::make_shared<detail::GatherSizes>(x, group, dim, timeout, /*now=*/false);
  return detail::pending_after(
      "all_gather", x, group, [sizes] { return sizes->are_known(); },
      [sizes, x, group, dim, timeout] { return detail::AllGatherOp::start(x, group, dim, sizes->get(), timeout); });
}

Pending async::all_gather_into(const at::Tensor& output, const at::Tensor& x, const Group& group) {
  detail::check_call("all_gather_into", x, group);
  detail::check_output("all_gather_into", output, x, x.numel() * group->getSize());
  return detail::pending({output, detail::AllGatherIntoOp::start(output, x, group, {})}, {"all_gather_into", x},
                         "all_gather_into");
}

}  // namespace serried
