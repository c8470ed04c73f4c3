// gather: every rank's tensor on one of them.
#include <ATen/ATen.h>

#include "serried/base/error.h"
#include "serried/comm/collectives/async.h"
#include "serried/comm/collectives/checks.h"
#include "serried/comm/collectives/collectives.h"
#include "serried/comm/collectives/op.h"
#include "serried/comm/collectives/ops.h"
#include "serried/comm/collectives/pending.h"
#include "serried/comm/collectives/pieces.h"
#include "serried/comm/collectives/rooted_shapes.h"

namespace serried {
namespace detail {
namespace {

struct Gather {
  static constexpr const char* kName = "gather";
  static constexpr const char* kArguments = "int dst, int[] sizes, int sizes_of_all=0";

  static at::Tensor kernel(const at::Tensor& x, const Group& group, int64_t dst, at::IntArrayRef sizes,
                           int64_t sizes_of_all, TimeoutMs timeout, WorkPtr* started) {
    const at::Tensor input = x.contiguous();
    const at::Tensor result = meta(x, group, dst, sizes, sizes_of_all);
    const std::vector<at::Tensor> pieces =
        group->getRank() == dst ? result.split_with_sizes(sizes) : std::vector<at::Tensor>();
    const Collective gathering{.kind = watch::Kind::gather,
                               .where = kName,
                               .inputs = input,
                               .outputs = pieces,
                               .root = int(dst),
                               .timeout = in_milliseconds(timeout),
                               .sizes_of_all = watch::hash_sizes({int64_t(watch::Kind::gather), sizes_of_all})};
    carry_out(group, gathering, started);
    return result;
  }
  static at::Tensor meta(const at::Tensor& x, const Group& group, int64_t dst, at::IntArrayRef sizes, int64_t) {
    if (group->getRank() != dst) return zeros_without_memory(sum_of(sizes), x.options());
    return at::empty({sum_of(sizes)}, x.options());
  }
  static void save(AutogradContext* ctx, int64_t dst, at::IntArrayRef sizes, int64_t sizes_of_all) {
    ctx->saved_data["dst"] = dst;
    ctx->saved_data["sizes"] = sizes.vec();
    ctx->saved_data["sizes_of_all"] = sizes_of_all;
  }
  static at::Tensor backward(AutogradContext* ctx, const Group& group, const at::Tensor& grad) {
    return ops::scatter(grad, group, ctx->saved_data["dst"].toInt(), ctx->saved_data["sizes"].toIntVector(),
                        uint32_t(ctx->saved_data["sizes_of_all"].toInt()));
  }
};

using GatherOp = FunctionalOp<Gather, int64_t, at::IntArrayRef, int64_t>;

TORCH_LIBRARY_FRAGMENT(serried, m) {
  GatherOp::define(m);
}

TORCH_LIBRARY_IMPL(serried, CompositeExplicitAutograd, m) {
  GatherOp::on_devices(m);
}

TORCH_LIBRARY_IMPL(serried, Meta, m) {
  GatherOp::on_meta(m);
}

TORCH_LIBRARY_IMPL(serried, Autograd, m) {
  GatherOp::on_autograd(m);
}

// The root could not make one to receive into: it has no scales of its own.
void check_not_quantized(const at::Tensor& x) {
  if (!x.is_quantized()) return;
  raise<c10::NotImplementedError>({Gather::kName,
                                   c10::str("the tensor is ", x.scalar_type(), ", and gather takes no quantized ones"),
                                   "pass x.int_repr(), and make the tensor of it where it arrives"});
}

TimeoutMs checked(const at::Tensor& x, const Group& group, const GatherOptions& options) {
  check_call(Gather::kName, x, group);
  check_strided(Gather::kName, x);
  check_not_quantized(x);
  check_not_distributed(Gather::kName, x);
  check_rank(Gather::kName, "dst", options.dst, group);
  return checked_timeout(Gather::kName, options.timeout);
}

// In one row. Where any rank needs a gradient all take part in backward, so that none waits for another.
at::Tensor gathered_input(const at::Tensor& x, const GatheredParts& parts) {
  const bool joins = parts.need_grad && !x.requires_grad();
  return (joins ? x.detach().requires_grad_() : x).reshape({-1});
}

// Not as views of each other, so that each may be written.
std::vector<at::Tensor> cut(const at::Tensor& whole, const GatheredParts& parts) {
  const at::AutoGradMode as_the_call(whole.requires_grad());
  std::vector<at::Tensor> all = at::unsafe_split_with_sizes(whole, parts.sizes);
  for (size_t rank = 0; rank < all.size(); ++rank) all[rank] = at::_unsafe_view(all[rank], parts.shapes[rank]);
  return all;
}

}  // namespace

at::Tensor ops::gather(const at::Tensor& x, const Group& group, int64_t dst, at::IntArrayRef sizes,
                       uint32_t sizes_of_all) {
  return GatherOp::call(x, group, dst, sizes, int64_t(sizes_of_all), {});
}

}  // namespace detail

std::vector<at::Tensor> gather(const at::Tensor& x, const Group& group, GatherOptions options) {
  const auto timeout = detail::checked(x, group, options);
  const detail::GatheredParts parts = detail::GatherShapes(x, group, options.dst, timeout, /*now=*/true).get();
  return detail::cut(detail::GatherOp::call(detail::gathered_input(x, parts), group, options.dst, parts.sizes,
                                            parts.sizes_of_all, timeout),
                     parts);
}

PendingTensors async::gather(const at::Tensor& x, const Group& group, GatherOptions options) {
  const auto timeout = detail::checked(x, group, options);
  auto shapes = std::make_shared<detail::GatherShapes>(x, group, options.dst, timeout, /*now=*/false);
  const Pending whole = detail::pending_after(
      "gather", x, group, [shapes] { return shapes->are_known(); },
      [shapes, x, group, dst = options.dst, timeout] {
        const detail::GatheredParts parts = shapes->get();
        return detail::GatherOp::start(detail::gathered_input(x, parts), group, dst, parts.sizes, parts.sizes_of_all,
                                       timeout);
      });
  return detail::pending_parts(whole, [shapes](const at::Tensor& all) { return detail::cut(all, shapes->get()); });
}

}  // namespace serried
