// Gradients that reach their parameters as pending sums: all of one backward are added up by one collective.
#include "serried/tape/library_hook.h"
#include "serried/tensor/making/joined_sums.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <vector>

#include "serried/tensor/debug/comm_notes.h"
#include "serried/tensor/dtensor.h"
#include "serried/tensor/making/backward_end.h"
#include "serried/tensor/meta.h"

namespace serried {
namespace {

struct Late {
  WeakTensor parameter;
  Placements placements;  // where its gradient belongs
};
using LateOnes = std::vector<Late>;

bool go_together(const detail::PendingSum& a, const detail::PendingSum& b) {
  const Spec &first = *dtensor_meta(a.tensor)->spec, &second = *dtensor_meta(b.tensor)->spec;
  return first.dtype == second.dtype && first.mesh == second.mesh && first.placements == second.placements &&
         a.placements == b.placements;
}

// Side by side as one vector of whatever sizes the parts have; what is cut on some axis is as good as plain here, since
// every rank of the axes that are summed over has the same cut.
void add_up(const std::vector<detail::PendingSum>& sums) {
  const comm_debug::OnBehalf scope([&](auto add) {
    for (const detail::PendingSum& each : sums) add(each.parameter.unsafeGetTensorImpl());
  });
  std::vector<at::Tensor> flat;
  for (const detail::PendingSum& each : sums) flat.push_back(dtensor_meta(each.tensor)->local.reshape(-1));
  const at::Tensor joined = sums.size() == 1 ? flat[0] : at::cat(flat);
  const Spec& spec = *dtensor_meta(sums[0].tensor)->spec;
  Placements from = spec.placements;
  for (Placement& p : from) p = p.is_partial() ? p : Replicate();
  const DTensor pending(wrap(joined, spec_of_result(joined, spec.mesh, from, joined.sizes())));
  const at::Tensor whole = dtensor_meta(pending.redistribute(Placements(from.size())))->local;
  int64_t begin = 0;
  for (const detail::PendingSum& each : sums) {
    const DTensorMeta& meta = *dtensor_meta(each.tensor);
    // In memory of its own: what was pending may be shared with other gradients.
    const at::Tensor part = whole.narrow(0, begin, meta.local.numel()).view(meta.local.sizes());
    begin += meta.local.numel();
    set_meta(each.tensor, sums.size() == 1 ? part : part.clone(), with_placements(*meta.spec, each.placements));
  }
}

// Those of the gradients that are pending still.
void add_up_late(const LateOnes& late) {
  std::vector<detail::PendingSum> sums;
  for (const Late& each : late) {
    const at::Tensor parameter = each.parameter.lock();
    if (!parameter.defined() || !parameter.grad().defined()) continue;
    const DTensorMeta* meta = dtensor_meta(parameter.grad());
    if (meta == nullptr || !detail::only_sums(meta->spec->placements, each.placements)) continue;
    sums.push_back({parameter, parameter.grad(), each.placements});
  }
  detail::add_up_together(std::move(sums));
}

// Whether somebody is told of the gradient as soon as it is there: a reducer of data parallel training, or a user.
bool has_listeners(const at::Tensor& parameter) {
  const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(parameter);
  if (!accumulator) return true;
  return !accumulator->post_hooks().empty() || torch::autograd::impl::post_acc_grad_hooks(parameter) != nullptr ||
         num_user_hooks(parameter) > 0;
}

// The list of the running backward; backwards nest, and the one inside ends first.
LateOnes& late_ones() {
  struct OfTask {
    int id = -1;
    std::weak_ptr<LateOnes> late;
  };
  thread_local OfTask current;
  const int task = torch::autograd::get_current_graph_task_id();
  std::shared_ptr<LateOnes> late = current.id == task ? current.late.lock() : nullptr;
  if (late == nullptr) {
    late = std::make_shared<LateOnes>();
    current = {task, late};
    detail::when_backward_ends([late](bool completed) {
      if (completed) add_up_late(*late);
    });
  }
  return *late;
}

}  // namespace

bool detail::only_sums(const Placements& from, const Placements& to) {
  if (from.size() != to.size()) return false;
  bool sums = false;
  for (size_t axis = 0; axis < from.size(); ++axis) {
    if (from[axis] == to[axis]) continue;
    if (!from[axis].is_partial(ReduceKind::sum) || !to[axis].is_replicate()) return false;
    sums = true;
  }
  return sums;
}

void detail::add_up_together(std::vector<PendingSum> sums) {
  const at::NoGradGuard no_grad;
  while (!sums.empty()) {
    std::vector<PendingSum> together, rest;
    for (PendingSum& each : sums) (go_together(each, sums[0]) ? together : rest).push_back(each);
    add_up(together);
    sums = std::move(rest);
  }
}

bool detail::sum_up_later(const WeakTensor& parameter, const at::Tensor& grad, const Placements& placements) {
  const DTensorMeta* meta = dtensor_meta(grad);
  if (meta == nullptr || !only_sums(meta->spec->placements, placements)) return false;
  // Who asked for it, or derives it once more, wants it as it will be; and it would be summed up at once where it meets
  // one that is whole.
  if (at::GradMode::is_enabled() || is_towards_chosen_tensors()) return false;
  const at::Tensor of = parameter.lock();
  if (!of.defined() || of.grad().defined() || has_listeners(of)) return false;
  late_ones().push_back({parameter, placements});
  return true;
}

}  // namespace serried
