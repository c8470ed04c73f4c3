// all_to_all: every rank sends a piece to every rank.
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

struct AllToAll {
  static constexpr const char* kName = "all_to_all";
  static constexpr const char* kArguments =
      "int split_dim, int concat_dim, int[] split_sizes, int[] concat_sizes, int sizes_of_all=0";

  static at::Tensor kernel(const at::Tensor& x, const Group& group, int64_t split_dim, int64_t concat_dim,
                           at::IntArrayRef split_sizes, at::IntArrayRef concat_sizes, int64_t sizes_of_all,
                           TimeoutMs timeout, WorkPtr* started) {
    const at::Tensor result = meta(x, group, split_dim, concat_dim, split_sizes, concat_sizes, sizes_of_all);
    const std::vector<at::Tensor> sent = cut_pieces(x, split_dim, split_sizes);
    const ArrivingPieces pieces(result, concat_dim, concat_sizes, /*one_each=*/true);
    const Collective exchange{.kind = watch::Kind::all_to_all,
                              .where = kName,
                              .inputs = sent,
                              .outputs = pieces.outputs(),
                              .timeout = in_milliseconds(timeout),
                              .sizes_of_all = uint32_t(sizes_of_all)};
    carry_out(group, exchange, started, pieces.what_is_left());
    return result;
  }
  // Where both dims are one, what comes replaces what went.
  static at::Tensor meta(const at::Tensor& x, const Group& group, int64_t split_dim, int64_t concat_dim,
                         at::IntArrayRef split_sizes, at::IntArrayRef concat_sizes, int64_t) {
    const std::vector<int64_t> piece = with_size(x.sizes(), split_dim, split_sizes[group->getRank()]);
    return at::empty(with_size(piece, concat_dim, sum_of(concat_sizes)), x.options());
  }
  static void save(AutogradContext* ctx, int64_t split_dim, int64_t concat_dim, at::IntArrayRef split_sizes,
                   at::IntArrayRef concat_sizes, int64_t sizes_of_all) {
    ctx->saved_data["split_dim"] = split_dim;
    ctx->saved_data["concat_dim"] = concat_dim;
    ctx->saved_data["split_sizes"] = split_sizes.vec();
    ctx->saved_data["concat_sizes"] = concat_sizes.vec();
    ctx->saved_data["sizes_of_all"] = sizes_of_all;
  }
  static at::Tensor backward(AutogradContext* ctx, const Group& group, const at::Tensor& grad) {
    auto& saved = ctx->saved_data;
    return ops::all_to_all(grad, group, saved["concat_dim"].toInt(), saved["split_dim"].toInt(),
                           saved["concat_sizes"].toIntVector(), saved["split_sizes"].toIntVector(),
                           uint32_t(saved["sizes_of_all"].toInt()));
  }
};

struct AllToAllInto : MovingInto {
  static constexpr const char* kName = "all_to_all_into";

  static void kernel(const at::Tensor& output, const at::Tensor& x, const Group& group, TimeoutMs timeout,
                     WorkPtr* started) {
    move_into(watch::Kind::all_to_all, kName, output, x, group, timeout, started);
  }
};

using AllToAllOp = FunctionalOp<AllToAll, int64_t, int64_t, at::IntArrayRef, at::IntArrayRef, int64_t>;
using AllToAllIntoOp = PlainOp<AllToAllInto, const at::Tensor&, const Group&>;

TORCH_LIBRARY_FRAGMENT(serried, m) {
  AllToAllOp::define(m);
  AllToAllIntoOp::define(m);
}

TORCH_LIBRARY_IMPL(serried, CompositeExplicitAutograd, m) {
  AllToAllOp::on_devices(m);
  AllToAllIntoOp::on_devices(m);
}

TORCH_LIBRARY_IMPL(serried, Meta, m) {
  AllToAllOp::on_meta(m);
  AllToAllIntoOp::on_meta(m);
}

TORCH_LIBRARY_IMPL(serried, Autograd, m) {
  AllToAllOp::on_autograd(m);
  AllToAllIntoOp::on_autograd(m);
}

TORCH_LIBRARY_IMPL(serried, ADInplaceOrView, m) {
  AllToAllIntoOp::on_version_count(m);
}

// What the op takes of a user's options, but for what comes from the other ranks.
struct CheckedExchange {
  int64_t split_dim;
  int64_t concat_dim;
  std::vector<int64_t> split_sizes;
  TimeoutMs timeout;
};

CheckedExchange checked(const at::Tensor& x, const Group& group, AllToAllOptions options) {
  constexpr const char* where = AllToAll::kName;
  check_call(where, x, group);
  check_not_distributed(where, x);
  const int64_t split_dim = checked_dim(where, "split_dim", x, options.split_dim);
  const int64_t concat_dim = checked_dim(where, "concat_dim", x, options.concat_dim);
  return {split_dim, concat_dim, checked_splits(x, split_dim, group->getSize(), std::move(options.split_sizes)),
          checked_timeout(where, options.timeout)};
}

void check_into(const at::Tensor& output, const at::Tensor& x, const Group& group) {
  constexpr const char* where = AllToAllInto::kName;
  check_call(where, x, group);
  check_not_distributed(where, x);
  check_divisible(where, x, group);
  check_output(where, output, x, x.numel());
}

}  // namespace

at::Tensor ops::all_to_all(const at::Tensor& x, const Group& group, int64_t split_dim, int64_t concat_dim,
                           at::IntArrayRef split_sizes, at::IntArrayRef concat_sizes, uint32_t sizes_of_all,
                           WorkPtr* started) {
  return AllToAllOp::call_or_start(x, group, split_dim, concat_dim, split_sizes, concat_sizes, int64_t(sizes_of_all),
                                   {}, started);
}

void ops::all_to_all_into(const at::Tensor& output, const at::Tensor& x, const Group& group, WorkPtr* started) {
  AllToAllIntoOp::call_or_start(output, x, group, {}, started);
}

}  // namespace detail

at::Tensor all_to_all(const at::Tensor& x, const Group& group, AllToAllOptions options) {
  const auto [split_dim, concat_dim, split_sizes, timeout] = detail::checked(x, group, std::move(options));
  const detail::ArrivingSizes arriving =
      detail::ExchangeSizes(x, group, split_dim, concat_dim, split_sizes, timeout, /*now=*/true).get();
  return detail::AllToAllOp::call(x, group, split_dim, concat_dim, split_sizes, arriving.sizes, arriving.sizes_of_all,
                                  timeout);
}

void all_to_all_into(const at::Tensor& output, const at::Tensor& x, const Group& group) {
  detail::check_into(output, x, group);
  detail::AllToAllIntoOp::call(output, x, group, {});
}

Pending async::all_to_all(const at::Tensor& x, const Group& group, AllToAllOptions options) {
  const detail::CheckedExchange call = detail::checked(x, group, std::move(options));
  auto sizes = std::make_shared<detail::ExchangeSizes>(x, group, call.split_dim, call.concat_dim, call.split_sizes,
                                                       call.timeout, /*now=*/false);
  return detail::pending_after(
      "all_to_all", x, group, [sizes] { return sizes->are_known(); },
      [sizes, x, group, call] {
        const detail::ArrivingSizes arriving = sizes->get();
        return detail::AllToAllOp::start(x, group, call.split_dim, call.concat_dim, call.split_sizes, arriving.sizes,
                                         arriving.sizes_of_all, call.timeout);
      });
}

Pending async::all_to_all_into(const at::Tensor& output, const at::Tensor& x, const Group& group) {
  detail::check_into(output, x, group);
  return detail::pending({output, detail::AllToAllIntoOp::start(output, x, group, {})}, {"all_to_all_into", x},
                         "all_to_all_into");
}

}  // namespace serried
