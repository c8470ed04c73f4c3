// scatter: to each rank its tensor of the list that one of them has.
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

// Ranks that are not the source have no tensor by which they could reach it, and would leave the source waiting.
void refuse_second_gradient(const Group& group) {
  if (!c10::GradMode::is_enabled() || group->getSize() == 1) return;
  raise<c10::NotImplementedError>({"scatter", "it has no second gradient, which create_graph asks for",
                                   "let every rank pass a tensor: all_to_all has second gradients"});
}

struct Scatter {
  static constexpr const char* kName = "scatter";
  static constexpr const char* kArguments = "int src, int[] sizes, int sizes_of_all=0";

  static at::Tensor kernel(const at::Tensor& x, const Group& group, int64_t src, at::IntArrayRef sizes,
                           int64_t sizes_of_all, TimeoutMs timeout, WorkPtr* started) {
    const at::Tensor result = meta(x, group, src, sizes, sizes_of_all);
    const std::vector<at::Tensor> pieces =
        group->getRank() == src ? cut_pieces(x, 0, sizes) : std::vector<at::Tensor>();
    const Collective scattering{.kind = watch::Kind::scatter,
                                .where = kName,
                                .inputs = pieces,
                                .outputs = result,
                                .root = int(src),
                                .timeout = in_milliseconds(timeout),
                                .sizes_of_all = watch::hash_sizes({int64_t(watch::Kind::scatter), sizes_of_all})};
    carry_out(group, scattering, started);
    return result;
  }
  static at::Tensor meta(const at::Tensor& x, const Group& group, int64_t, at::IntArrayRef sizes, int64_t) {
    return at::empty({sizes[size_t(group->getRank())]}, x.options());
  }
  static void save(AutogradContext* ctx, int64_t src, at::IntArrayRef sizes, int64_t sizes_of_all) {
    ctx->saved_data["src"] = src;
    ctx->saved_data["sizes"] = sizes.vec();
    ctx->saved_data["sizes_of_all"] = sizes_of_all;
  }
  static at::Tensor backward(AutogradContext* ctx, const Group& group, const at::Tensor& grad) {
    refuse_second_gradient(group);
    return ops::gather(grad, group, ctx->saved_data["src"].toInt(), ctx->saved_data["sizes"].toIntVector(),
                       uint32_t(ctx->saved_data["sizes_of_all"].toInt()));
  }
};

using ScatterOp = FunctionalOp<Scatter, int64_t, at::IntArrayRef, int64_t>;

TORCH_LIBRARY_FRAGMENT(serried, m) {
  ScatterOp::define(m);
}

TORCH_LIBRARY_IMPL(serried, CompositeExplicitAutograd, m) {
  ScatterOp::on_devices(m);
}

TORCH_LIBRARY_IMPL(serried, Meta, m) {
  ScatterOp::on_meta(m);
}

TORCH_LIBRARY_IMPL(serried, Autograd, m) {
  ScatterOp::on_autograd(m);
}

TimeoutMs checked(const Group& group, const ScatterOptions& options) {
  check_group(Scatter::kName, group);
  check_rank(Scatter::kName, "src", options.src, group);
  return checked_timeout(Scatter::kName, options.timeout);
}

at::Tensor shaped(const at::Tensor& part, at::IntArrayRef shape) {
  const at::AutoGradMode as_the_call(part.requires_grad());
  return at::_unsafe_view(part, shape);
}

}  // namespace

at::Tensor ops::scatter(const at::Tensor& x, const Group& group, int64_t src, at::IntArrayRef sizes,
                        uint32_t sizes_of_all) {
  return ScatterOp::call(x, group, src, sizes, int64_t(sizes_of_all), {});
}

}  // namespace detail

at::Tensor scatter(at::TensorList tensors, const Group& group, ScatterOptions options) {
  const auto timeout = detail::checked(group, options);
  const detail::ScatterShapes shapes(tensors, group, options.src, timeout, /*now=*/true);
  const detail::ScatteredParts parts = shapes.get();
  return detail::shaped(
      detail::ScatterOp::call(shapes.input(parts), group, options.src, parts.sizes, parts.sizes_of_all, timeout),
      parts.shape);
}

Pending async::scatter(at::TensorList tensors, const Group& group, ScatterOptions options) {
  const auto timeout = detail::checked(group, options);
  auto shapes = std::make_shared<detail::ScatterShapes>(tensors, group, options.src, timeout, /*now=*/false);
  // What is sent is a copy, which nobody else can write.
  const Pending part = detail::pending_after(
      "scatter", at::Tensor(), group, [shapes] { return shapes->are_known(); },
      [shapes, group, src = options.src, timeout] {
        const detail::ScatteredParts parts = shapes->get();
        return detail::ScatterOp::start(shapes->input(parts), group, src, parts.sizes, parts.sizes_of_all, timeout);
      });
  return part.then([shapes](const at::Tensor& whole) { return detail::shaped(whole, shapes->get().shape); });
}

}  // namespace serried
