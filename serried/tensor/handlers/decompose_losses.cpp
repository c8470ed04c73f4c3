// Losses that rules alone cannot express: a weighted mean over a cut batch divides two sums, and scaled gradients are
// finite only where all ranks' parts are.
#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/div.h>
#include <ATen/ops/index.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/nll_loss2d_backward.h>
#include <ATen/ops/nll_loss2d_forward.h>
#include <ATen/ops/nll_loss_backward.h>
#include <ATen/ops/nll_loss_forward.h>
#include <ATen/ops/norm.h>
#include <ATen/ops/sub.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>

#include "serried/tensor/dispatch/copied_view.h"
#include "serried/tensor/dispatch/handlers.h"
#include "serried/tensor/handlers/part_reduction.h"
#include "serried/tensor/making/like.h"
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

bool has_cut_classes(const at::Tensor& scores) {
  const DTensorMeta* meta = dtensor_meta(scores);
  return meta != nullptr && detail::PartReduction::is_needed(*meta, {scores.dim() == 1 ? 0 : 1});
}

// What a mean divides by: the class weights of all targets that count. A rank knows all targets of its samples, so
// where only classes are cut it need ask nobody.
at::Tensor total_weight(const at::Tensor& scores, const at::Tensor& target, const std::optional<at::Tensor>& weight,
                        int64_t ignore_index) {
  const at::Tensor index = target.to(at::kLong);
  const at::Tensor ignored = index.eq(ignore_index);
  if (!weight.has_value() || !weight->defined()) return ignored.logical_not().sum().to(scores.scalar_type());
  c10::List<std::optional<at::Tensor>> of_classes;
  of_classes.push_back(index.masked_fill(ignored, 0));
  return at::index(*weight, of_classes).masked_fill(ignored, 0).sum();
}

// Ignored targets and class weights make ranks count differently, so the mean of local means is not the mean.
template <class Forward>
bool nll_mean(const c10::OperatorHandle& op, Stack& stack, Forward forward) {
  if (detail::OpCall(op, stack).has_out()) return false;
  const auto arguments = torch::jit::last(stack, 5);
  const at::Tensor self = arguments[0].toTensor();
  const at::Tensor target = arguments[1].toTensor();
  if (arguments[3].toInt() != kMean || (!is_cut(self) && !is_cut(target))) return false;
  const auto weight = arguments[2].toOptional<at::Tensor>();
  const int64_t ignore_index = arguments[4].toInt();
  auto [sum, count] = forward(self, target, weight, kSum, ignore_index);
  const at::Tensor total = replicated(has_cut_classes(self) ? total_weight(self, target, weight, ignore_index) : count);
  const at::Tensor loss = at::div(sum, total);
  torch::jit::drop(stack, 5);
  torch::jit::push(stack, loss, total);
  return true;
}

// Targets that are cut over the ranks that share the classes become whole there: they are little beside the scores,
// which would else have to move. Calls `op` again if it moved some.
bool make_targets_whole(const c10::OperatorHandle& op, Stack& stack, size_t index_of_scores) {
  c10::IValue* const first = &stack[stack.size() - op.schema().arguments().size()];
  const DTensorMeta* scores = dtensor_meta(first[index_of_scores].toTensor());
  const DTensorMeta* target = dtensor_meta(first[index_of_scores + 1].toTensor());
  if (scores == nullptr || target == nullptr || scores->spec->mesh != target->spec->mesh) return false;
  const int64_t class_dim = scores->spec->sizes.size() == 1 ? 0 : 1;
  Placements whole = target->spec->placements;
  for (size_t axis = 0; axis < whole.size(); ++axis) {
    if (scores->spec->placements[axis].is_shard(class_dim)) whole[axis] = Replicate();
  }
  if (whole == target->spec->placements) return false;
  first[index_of_scores + 1] =
      wrap(redistribute_local(target->local, *target->spec, whole), with_placements(*target->spec, whole));
  op.callBoxed(stack);
  return true;
}

bool nll_loss(const c10::OperatorHandle& op, Stack& stack) {
  if (make_targets_whole(op, stack, 0)) return true;
  return nll_mean(op, stack, [](auto&&... a) { return at::nll_loss_forward(a...); });
}

bool nll_loss_2d(const c10::OperatorHandle& op, Stack& stack) {
  if (make_targets_whole(op, stack, 0)) return true;
  return nll_mean(op, stack, [](auto&&... a) { return at::nll_loss2d_forward(a...); });
}

// Only a mean was divided by the total weight: a pending one is not read, and need not be added up.
template <class Backward>
bool nll_backward(const c10::OperatorHandle& op, Stack& stack, Backward backward) {
  if (detail::OpCall(op, stack).has_out()) return false;
  const auto arguments = torch::jit::last(stack, 7);
  const at::Tensor total = arguments[6].toTensor();
  const DTensorMeta* meta = dtensor_meta(total);
  if (arguments[4].toInt() == kMean || meta == nullptr || !is_cut(total)) return false;
  const at::Tensor unread = wrap(meta->local, with_placements(*meta->spec, Placements(meta->spec->placements.size())));
  const at::Tensor gradient =
      backward(arguments[0].toTensor(), arguments[1].toTensor(), arguments[2].toTensor(),
               arguments[3].toOptional<at::Tensor>(), arguments[4].toInt(), arguments[5].toInt(), unread);
  torch::jit::drop(stack, 7);
  torch::jit::push(stack, gradient);
  return true;
}

bool nll_loss_backward(const c10::OperatorHandle& op, Stack& stack) {
  if (make_targets_whole(op, stack, 1)) return true;
  return nll_backward(op, stack, [](auto&&... a) { return at::nll_loss_backward(a...); });
}

bool nll_loss_2d_backward(const c10::OperatorHandle& op, Stack& stack) {
  if (make_targets_whole(op, stack, 1)) return true;
  return nll_backward(op, stack, [](auto&&... a) { return at::nll_loss2d_backward(a...); });
}

at::Tensor local_or_self(const at::Tensor& t) {
  const DTensorMeta* meta = dtensor_meta(t);
  return meta == nullptr ? t : meta->local;
}

struct Gradient {
  const DTensorMeta* meta;
  at::Tensor whole;  // differs from the part the tensor holds where that was a pending sum
};

void write_back(const Gradient& gradient) {
  if (gradient.meta == nullptr || gradient.whole.is_same(gradient.meta->local)) return;
  const Spec& spec = *gradient.meta->spec;
  const SpecPtr from = with_placements(spec, without_partial(spec.placements));
  gradient.meta->local.copy_(redistribute_local(gradient.whole, *from, spec.placements));
}

// The largest of all ranks of the mesh.
at::Tensor largest(const at::Tensor& local, const DeviceMesh& mesh) {
  const Placements pending(size_t(mesh.ndim()), Partial(ReduceKind::max));
  const SpecPtr spec = spec_of_result(local, mesh, pending, local.sizes());
  return redistribute_local(local, *spec, Placements(size_t(mesh.ndim())));
}

// Before the step of a scaled loss: every rank checks its parts, `found_inf` is that of all ranks.
bool check_and_unscale(const c10::OperatorHandle&, Stack& stack) {
  const auto arguments = torch::jit::last(stack, 3);
  const at::Tensor found_inf = arguments[1].toTensor();
  const at::Tensor inv_scale = local_or_self(arguments[2].toTensor());
  const DTensorMeta* first = nullptr;
  std::vector<Gradient> gradients;
  std::vector<at::Tensor> parts;
  for (const at::Tensor& t : arguments[0].toTensorVector()) {
    const DTensorMeta* meta = dtensor_meta(t);
    if (first == nullptr) first = meta;
    if (meta != nullptr) detail::begin_write("_amp_foreach_non_finite_check_and_unscale_", "self", *meta);
    // A pending sum says nothing about the value: it is checked once it is whole.
    at::Tensor whole =
        meta == nullptr ? t : redistribute_local(meta->local, *meta->spec, without_partial(meta->spec->placements));
    if (whole.numel() > 0) parts.push_back(whole);
    gradients.push_back({meta, std::move(whole)});
  }
  if (first == nullptr) return false;
  at::Tensor found = at::zeros_like(local_or_self(found_inf));
  if (!parts.empty()) at::_amp_foreach_non_finite_check_and_unscale_(parts, found, inv_scale);
  for (const Gradient& gradient : gradients) write_back(gradient);
  found = largest(found, first->spec->mesh);
  at::Tensor target = local_or_self(found_inf);
  target.copy_(at::maximum(target, found));
  torch::jit::drop(stack, 3);
  return true;
}

}  // namespace

std::vector<HandlerEntry> loss_handlers() {
  return {
      {"aten::_amp_foreach_non_finite_check_and_unscale_", check_and_unscale},
      {"aten::nll_loss2d_backward", nll_loss_2d_backward},
      {"aten::nll_loss2d_forward", nll_loss_2d},
      {"aten::nll_loss_backward", nll_loss_backward},
      {"aten::nll_loss_forward", nll_loss},
  };
}

}  // namespace serried
