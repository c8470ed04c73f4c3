// Sums and counts of this rank, added up over the ranks when asked for.
#include "serried/parallel/metrics.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <utility>

#include "serried/base/error.h"
#include "serried/comm/collectives/collectives.h"
#include "serried/comm/collectives/watch.h"
#include "serried/tensor/meta.h"

namespace serried {
namespace {

// A DTensor is one tensor of all ranks: each would count it again.
void check_plain(const char* where, const at::Tensor& t) {
  if (!t.defined()) raise<c10::ValueError>({where, "the tensor is undefined", "pass a tensor"});
  if (t.is_complex()) {
    raise<c10::TypeError>({where, "the tensor is complex, and means are real", "pass its absolute value or a part"});
  }
  if (dtensor_meta(t) == nullptr) return;
  raise<c10::TypeError>({where, c10::str("the tensor is a DTensor, ", dtensor_meta(t)->spec->to_string()),
                         "pass this rank's own samples: to_local() of what is cut along the batch"});
}

// Counts are added up in f64, with the sums.
void check_count(int64_t count) {
  constexpr int64_t kMostExact = int64_t(1) << 53;
  if (count >= 0 && count <= kMostExact) return;
  raise<c10::ValueError>({"Mean.add", c10::str("count is ", count), "pass how many samples the mean is of"});
}

// One that is no class would count as a wrong answer.
void check_targets(const at::Tensor& targets, int64_t num_classes, std::optional<int64_t> ignored) {
  at::Tensor is_none = targets.lt(0).logical_or(targets.ge(num_classes));
  if (ignored) is_none = is_none.logical_and(targets.ne(*ignored));
  const at::Tensor wrong = targets.masked_select(is_none);
  if (wrong.numel() == 0) return;
  raise<c10::IndexError>({"Accuracy.add",
                          c10::str("target ", wrong[0].item<int64_t>(), " is none of the ", num_classes, " classes"),
                          "pass targets from 0 on, or name the one to leave out: {.ignore_index = ...}"});
}

// Of each sample, whether its target is among the k best scores, or is the class predicted.
at::Tensor hits(const at::Tensor& predictions, const at::Tensor& targets, const AccuracyOptions& options) {
  const int64_t top_k = options.top_k;
  const bool are_classes = !predictions.is_floating_point() && predictions.sizes() == targets.sizes();
  if (are_classes && top_k == 1) return predictions.eq(targets);
  const bool fits =
      predictions.dim() == targets.dim() + 1 && predictions.sizes().slice(0, targets.dim()) == targets.sizes();
  if (!fits || predictions.size(-1) < top_k) {
    raise<c10::ValueError>(
        {"Accuracy.add",
         c10::str("predictions are ", predictions.sizes(), " and targets ", targets.sizes(), " with top_k ", top_k),
         "pass scores of [..., classes], at least top_k of them, or classes as integers, beside targets of [...]"});
  }
  check_targets(targets, predictions.size(-1), options.ignore_index);
  if (top_k == 1) return predictions.argmax(-1).eq(targets);  // of equal scores topk takes any
  const at::Tensor best = std::get<1>(predictions.topk(top_k, -1));
  return best.eq(targets.unsqueeze(-1)).any(-1);
}

}  // namespace

Mean::Mean(Group process_group)
    : group_(process_group ? std::move(process_group) : require_current_process_group("Mean")) {}

void Mean::add_sum(const at::Tensor& sum, double count) {
  const at::Tensor number = sum.detach().to(at::kDouble).reshape({});
  const at::Tensor added = at::stack({number, at::full({}, count, number.options())});
  sums_ = sums_.defined() ? sums_ + added.to(sums_.device()) : added;
}

void Mean::add(const at::Tensor& values) {
  check_plain("Mean.add", values);
  const at::NoGradGuard no_grad;
  add_sum(values.sum(at::kDouble), double(values.numel()));
}

void Mean::add(const at::Tensor& mean, int64_t count) {
  check_plain("Mean.add", mean);
  check_count(count);
  if (mean.numel() != 1) {
    raise<c10::ValueError>({"Mean.add", c10::str("the mean of ", count, " samples has sizes ", mean.sizes()),
                            "pass one number, or values without a count"});
  }
  const at::NoGradGuard no_grad;
  if (count > 0) add_sum(mean.to(at::kDouble) * double(count), double(count));
}

void Mean::add(double mean, int64_t count) {
  check_count(count);
  const at::NoGradGuard no_grad;
  if (count > 0) add_sum(at::full({}, mean * double(count), at::kDouble), double(count));
}

at::Tensor Mean::totals() const {
  const at::NoGradGuard no_grad;
  at::Tensor totals = sums_.defined() ? sums_.clone() : at::zeros({2}, at::kDouble);
  const watch::PartOf scope("Mean.compute");
  all_reduce_(totals, group_);
  return totals;
}

double Mean::compute() const {
  const at::Tensor all = totals().cpu();
  const double count = all[1].item<double>();
  if (count == 0) {
    raise<c10::ValueError>({"Mean.compute", "no rank has added anything", "add values before asking for their mean"});
  }
  return all[0].item<double>() / count;
}

int64_t Mean::count() const {
  return int64_t(totals()[1].item<double>());
}

void Mean::reset() {
  sums_.reset();
}

Accuracy::Accuracy(AccuracyOptions options) : options_(std::move(options)), right_(options_.process_group) {
  if (options_.top_k >= 1) return;
  raise<c10::ValueError>({"Accuracy", c10::str("top_k is ", options_.top_k), "pass 1 or more"});
}

void Accuracy::add(const at::Tensor& predictions, const at::Tensor& targets) {
  check_plain("Accuracy.add", predictions);
  check_plain("Accuracy.add", targets);
  const at::NoGradGuard no_grad;
  const at::Tensor right = hits(predictions, targets, options_);
  right_.add(options_.ignore_index ? right.masked_select(targets.ne(*options_.ignore_index)) : right);
}

}  // namespace serried
