// Losses that rules alone cannot express: a weighted mean over a cut batch divides two sums.
#include <ATen/ops/div.h>
#include <ATen/ops/nll_loss2d_forward.h>
#include <ATen/ops/nll_loss_forward.h>
#include <ATen/ops/norm.h>
#include <ATen/ops/sub.h>

#include <algorithm>

#include "serried/tensor/dispatch/handlers.h"
#include "serried/tensor/handlers/loss_scaling.h"
#include "serried/tensor/meta.h"
#include "serried/tensor/redistribute/redistribute.h"

namespace serried {
namespace {

using torch::jit::Stack;

constexpr int64_t kMean = 1;
constexpr int64_t kSum = 2;

bool is_cut(const at::Tensor& t) {
  const DTensorMeta* meta = dtensor_meta(t);
  if (meta == nullptr) return false;
  const Placements& placements = meta->spec->placements;
  return !std::all_of(placements.begin(), placements.end(), [](const Placement& p) { return p.is_replicate(); });
}

at::Tensor replicated(const at::Tensor& t) {
  const DTensorMeta* meta = dtensor_meta(t);
  if (meta == nullptr || !is_cut(t)) return t;
  const Placements whole(meta->spec->placements.size());
  return wrap(redistribute_local(meta->local, *meta->spec, whole), with_placements(*meta->spec, whole));
}

// Ignored targets and class weights make ranks count differently, so the mean of local means is not the mean.
template <class Forward>
bool nll_mean(Stack& stack, Forward forward) {
  const auto arguments = torch::jit::last(stack, 5);
  const at::Tensor self = arguments[0].toTensor();
  const at::Tensor target = arguments[1].toTensor();
  if (arguments[3].toInt() != kMean || (!is_cut(self) && !is_cut(target))) return false;
  auto [sum, count] = forward(self, target, arguments[2].toOptional<at::Tensor>(), kSum, arguments[4].toInt());
  const at::Tensor total = replicated(count);
  const at::Tensor loss = at::div(sum, total);
  torch::jit::drop(stack, 5);
  torch::jit::push(stack, loss, total);
  return true;
}

bool nll_loss(const c10::OperatorHandle&, Stack& stack) {
  return nll_mean(stack, [](auto&&... a) { return at::nll_loss_forward(a...); });
}

bool nll_loss_2d(const c10::OperatorHandle&, Stack& stack) {
  return nll_mean(stack, [](auto&&... a) { return at::nll_loss2d_forward(a...); });
}

}  // namespace

std::vector<HandlerEntry> loss_handlers() {
  return {
      {"aten::_amp_foreach_non_finite_check_and_unscale_", detail::check_and_unscale},
      {"aten::nll_loss2d_forward", nll_loss_2d},
      {"aten::nll_loss_forward", nll_loss},
  };
}

}  // namespace serried
