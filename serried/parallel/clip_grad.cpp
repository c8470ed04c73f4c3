// Sums of powers, or maxima, per set of ranks that gradients are cut over; then all sets together.
#include "serried/parallel/clip_grad.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <unordered_set>
#include <utility>

#include "serried/base/error.h"
#include "serried/comm/collectives/collectives.h"
#include "serried/parallel/pipeline/tied_copies.h"
#include "serried/tape/recorder.h"
#include "serried/tensor/meta.h"
#include "serried/tensor/redistribute/redistribute.h"

namespace serried {
namespace {

constexpr const char* kClip = "clip_grad_norm_";

std::vector<int64_t> cut_axes(const Spec& spec) {
  std::vector<int64_t> axes;
  for (int64_t axis = 0; axis < spec.mesh.ndim(); ++axis) {
    if (spec.placements[size_t(axis)].is_shard() && spec.mesh.size(axis) > 1) axes.push_back(axis);
  }
  return axes;
}

// The ranks, of the root's group and ascending, that differ from this one in `axes` only.
std::vector<int64_t> ranks_along(const DeviceMesh& mesh, const std::vector<int64_t>& axes) {
  const Position here = mesh.position();
  std::vector<int64_t> ranks;
  for (size_t k = 0; k < mesh.rank_list().size(); ++k) {
    int64_t rest = int64_t(k);
    bool is_along = true;
    for (int64_t axis = mesh.ndim() - 1; axis >= 0; --axis) {
      const int64_t coordinate = rest % mesh.size(axis);
      rest /= mesh.size(axis);
      const bool may_differ = std::find(axes.begin(), axes.end(), axis) != axes.end();
      is_along &= may_differ || coordinate == here.coordinate[size_t(axis)];
    }
    if (is_along) ranks.push_back(mesh.rank_list()[k]);
  }
  std::sort(ranks.begin(), ranks.end());
  return ranks;
}

// Gradients that the same ranks hold the parts of.
struct Holders {
  Group root;
  std::vector<int64_t> ranks;  // none: what this rank holds is the whole
  Group group;
  std::vector<at::Tensor> parts;
};

class GradientParts {
 public:
  // A parameter without a gradient on this rank may have one on another: its ranks meet all the same.
  void add(const at::Tensor& parameter, bool counts) {
    const at::Tensor& grad = parameter.grad();
    const DTensorMeta* meta = dtensor_meta(parameter);
    if (meta != nullptr && (grad.defined() || parameter.requires_grad())) holders_of(*meta->spec);
    if (!grad.defined()) return;
    gradients_.push_back(grad);
    if (!counts) return;
    ++num_counted_;
    const DTensorMeta* grad_meta = dtensor_meta(grad);
    if (grad_meta == nullptr) {
      holders_of_whole().parts.push_back(grad.is_sparse() ? grad.coalesce().values() : grad);
      return;
    }
    const Spec& spec = *grad_meta->spec;
    const at::Tensor part = redistribute_local(grad_meta->local, spec, without_partial(spec.placements));
    holders_of(spec).parts.push_back(part);
  }

  const std::vector<at::Tensor>& gradients() const { return gradients_; }
  int64_t num_counted() const { return num_counted_; }
  const std::vector<Holders>& all() const { return holders_; }

 private:
  Holders& holders_of(const Spec& spec) {
    const std::vector<int64_t> axes = cut_axes(spec);
    if (axes.empty()) return holders_of_whole();
    std::vector<int64_t> ranks = ranks_along(spec.mesh, axes);
    for (Holders& known : holders_) {
      if (known.root == spec.mesh.root_group() && known.ranks == ranks) return known;
    }
    holders_.push_back({spec.mesh.root_group(), std::move(ranks), spec.mesh.get_merged_group(axes), {}});
    return holders_.back();
  }

  Holders& holders_of_whole() {
    for (Holders& known : holders_) {
      if (known.ranks.empty()) return known;
    }
    return holders_.emplace_back();
  }

  std::vector<at::Tensor> gradients_;
  int64_t num_counted_ = 0;
  std::vector<Holders> holders_;  // in the order they are met, which is the same on all their ranks
};

// Of one order: what parts contribute, and how contributions are put together.
class Norm {
 public:
  explicit Norm(double order)
      : order_(order), reduction_(std::isinf(order) ? c10d::ReduceOp::MAX : c10d::ReduceOp::SUM) {}

  const c10d::ReduceOp::RedOpType& reduction() const { return reduction_; }

  // f64, without dims: in f32 the square of a norm overflows early.
  at::Tensor contribution(const std::vector<at::Tensor>& parts, const at::TensorOptions& options) const {
    std::vector<at::Tensor> norms;
    for (const at::Tensor& part : parts) {
      if (part.numel() == 0) continue;
      const bool is_reduced = c10::isReducedFloatingType(part.scalar_type());
      const auto dtype = is_reduced ? std::optional(at::kFloat) : std::nullopt;
      norms.push_back(at::linalg_vector_norm(part, order_, std::nullopt, false, dtype).to(options));
    }
    if (norms.empty()) return at::zeros({}, options);
    const at::Tensor all = at::stack(norms);
    return is_max() ? all.max() : all.pow(order_).sum();
  }

  at::Tensor joined(const std::vector<at::Tensor>& contributions) const {
    const at::Tensor all = at::stack(contributions);
    return is_max() ? all.max() : all.sum();
  }

  at::Tensor finished(const at::Tensor& contribution) const {
    return is_max() || order_ == 1 ? contribution : contribution.pow(1 / order_);
  }

 private:
  bool is_max() const { return std::isinf(order_); }

  double order_;
  c10d::ReduceOp::RedOpType reduction_;
};

void check_numbers(double max_norm, double norm_type) {
  if (!(max_norm >= 0)) {
    raise<c10::ValueError>({kClip, c10::str("max_norm is ", max_norm), "pass 0 or more"});
  }
  if (std::isnan(norm_type) || (std::isinf(norm_type) && norm_type < 0)) {
    raise<c10::ValueError>({kClip, c10::str("norm_type is ", norm_type), "pass a number or infinity"});
  }
}

// A replay reads nothing on the host, so it would raise nothing.
void check_not_recorded() {
  if (!tape::is_replayed()) return;
  raise<c10::NotImplementedError>({kClip, "error_if_nonfinite reads the norm on the host, which a replay does not do",
                                   "return norm.tensor() from the captured function and look at it outside"});
}

void check_finite(double norm, double norm_type) {
  if (std::isfinite(norm)) return;
  raise<c10::Error>(
      {kClip, c10::str("the norm of order ", norm_type, " of the gradients is ", norm, ", so it cannot be clipped"),
       "find what made it so, or leave error_if_nonfinite out to scale by it all the same"});
}

// Of order 0 it is, as torch's, how many gradients there are.
at::Tensor norm_of(const GradientParts& parts, double norm_type, const at::TensorOptions& options,
                   const Group& pipeline) {
  if (norm_type == 0) {
    const at::Tensor count = at::full({}, double(parts.num_counted()), options);
    if (pipeline) all_reduce_(count, pipeline);
    return count;
  }
  const Norm norm(norm_type);
  std::vector<at::Tensor> contributions;
  for (const Holders& holders : parts.all()) {
    contributions.push_back(norm.contribution(holders.parts, options));
    if (holders.group) all_reduce_(contributions.back(), holders.group, norm.reduction());
  }
  at::Tensor total = contributions.empty() ? at::zeros({}, options) : norm.joined(contributions);
  if (pipeline) all_reduce_(total, pipeline, norm.reduction());
  return norm.finished(total);
}

}  // namespace

GradNorm clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm, double norm_type,
                         ClipOptions options) {
  check_numbers(max_norm, norm_type);
  if (options.error_if_nonfinite) check_not_recorded();
  const at::NoGradGuard no_grad;
  GradientParts parts;
  at::TensorOptions doubles = at::TensorOptions(at::kDouble);
  std::unordered_set<const void*> seen;  // modules that share a parameter list it each
  for (const at::Tensor& parameter : parameters) {
    if (!parameter.defined() || !seen.insert(parameter.unsafeGetTensorImpl()).second) continue;
    parts.add(parameter, /*counts=*/!options.pipeline || !detail::is_tied_copy(parameter));
    doubles = doubles.device(parameter.device());
  }
  const at::Tensor norm = norm_of(parts, norm_type, doubles, options.pipeline);
  if (options.error_if_nonfinite) check_finite(norm.item<double>(), norm_type);
  const at::Tensor factor = (max_norm / (norm + 1e-6)).clamp_max(1.0);
  for (at::Tensor grad : parts.gradients()) grad.mul_(factor.to(grad.device()));
  return GradNorm(norm);
}

GradNorm clip_grad_norm_(const at::Tensor& parameter, double max_norm, double norm_type, ClipOptions options) {
  return clip_grad_norm_(std::vector<at::Tensor>{parameter}, max_norm, norm_type, std::move(options));
}

}  // namespace serried
