// Chooses experts by logits, sends the tokens there, and adds up what comes back.
#include "serried/parallel/expert_parallel/moe.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "serried/base/error.h"
#include "serried/comm/collectives/collectives.h"
#include "serried/comm/collectives/watch.h"
#include "serried/parallel/expert_parallel/own_experts.h"
#include "serried/parallel/expert_parallel/token_way.h"
#include "serried/tensor/dtensor.h"
#include "serried/tensor/making/placing.h"
#include "serried/tensor/meta.h"

namespace serried {
namespace {

constexpr const char* kMoe = "moe";

// Which experts a call has, and how they run.
struct LocalExperts {
  std::optional<int64_t> count;  // none: as many as the mesh leaves for each rank
  bool train;
  std::function<at::Tensor(const DispatchedTokens& dispatched, const at::Tensor& weights)> run;
};

void check_defined(const at::Tensor& x, const at::Tensor& logits) {
  if (x.defined() && logits.defined() && x.dim() >= 2 && logits.dim() >= 2 && x.is_floating_point() &&
      logits.is_floating_point()) {
    return;
  }
  const auto text = [](const at::Tensor& t) { return t.defined() ? watch::describe_tensor(t) : "undefined"; };
  raise<c10::ValueError>({kMoe, c10::str("x is ", text(x), " and logits are ", text(logits)),
                          "pass tokens [..., features] and logits [tokens, all experts] of a floating dtype"});
}

void check_sizes(const at::Tensor& x, const at::Tensor& logits, int64_t top_k) {
  const auto leading = [](const at::Tensor& t) { return t.sizes().slice(0, size_t(t.dim()) - 1); };
  const int64_t num_tokens = c10::multiply_integers(leading(x));
  const bool fits = logits.dim() == 2 ? logits.size(0) == num_tokens : leading(logits) == leading(x);
  if (!fits) {
    raise<c10::ValueError>({kMoe,
                            c10::str("x ", watch::describe_tensor(x), " has ", num_tokens, " tokens, which logits ",
                                     watch::describe_tensor(logits), " do not fit"),
                            "pass logits [tokens, all experts]: one row for each token of this rank"});
  }
  if (top_k >= 1 && top_k <= logits.size(-1)) return;
  raise<c10::ValueError>({kMoe, c10::str("top_k is ", top_k, ", and logits have ", logits.size(-1), " experts"),
                          "pass a top_k from 1 to the number of experts"});
}

// Of equal logits the first expert comes first, NaN before all others.
at::Tensor best_experts(const at::Tensor& logits, int64_t top_k) {
  const at::NoGradGuard no_grad;
  if (top_k == 1) return logits.argmax(-1, /*keepdim=*/true);
  return std::get<1>(logits.sort(/*stable=*/true, -1, /*descending=*/true)).narrow(-1, 0, top_k);
}

at::Tensor run_local(const at::Tensor& x, const at::Tensor& logits, const DeviceMesh& mesh, const LocalExperts& local,
                     const MoeOptions& options) {
  check_sizes(x, logits, options.top_k);
  const int64_t num_experts = logits.size(-1);
  const at::Tensor experts = best_experts(logits, options.top_k);
  const at::Tensor weights = at::softmax(logits.gather(-1, experts), -1);
  const detail::DispatchCall call{.where = kMoe,
                                  .mesh = mesh,
                                  .num_experts = num_experts,
                                  .num_local = local.count.value_or(num_experts / mesh.size()),
                                  .trains = local.train,
                                  .is_in_range = true,
                                  .has_unit_weights = options.top_k == 1};
  const DispatchedTokens dispatched = detail::dispatch(
      call, x, experts, {.capacity = options.capacity, .average_gradients = options.average_gradients});
  if (options.load != nullptr) *options.load = {dispatched.tokens_per_expert, dispatched.dropped};
  return local.run(dispatched, weights);
}

// Ranks of `mesh` that hold the same part of a tensor as this one.
bool holds_twice(const DTensor& x, const DeviceMesh& experts) {
  const DeviceMesh& mesh = x.device_mesh();
  const std::optional<std::vector<int64_t>> mine = mesh.get_coordinate();
  if (!mine) return false;
  const std::vector<int64_t>& ranks = mesh.rank_list();
  for (size_t i = 0; i < ranks.size(); ++i) {
    int64_t rest = int64_t(i);
    bool holds_the_same = ranks[i] != mesh.get_rank();
    for (int64_t axis = mesh.ndim() - 1; axis >= 0; --axis) {
      const int64_t place = rest % mesh.size(axis);
      rest /= mesh.size(axis);
      if (place != (*mine)[size_t(axis)]) holds_the_same &= x.placements()[size_t(axis)].is_replicate();
    }
    const std::vector<int64_t>& theirs = experts.rank_list();
    if (holds_the_same && std::find(theirs.begin(), theirs.end(), ranks[i]) != theirs.end()) return true;
  }
  return false;
}

void check_placed(const DTensor& x, const DeviceMesh& experts) {
  for (const Placement& placement : x.placements()) {
    const bool cuts_tokens = placement.is_shard() && placement.dim() != x.dim() - 1;
    if (placement.is_replicate() || cuts_tokens) continue;
    raise<c10::ValueError>({kMoe, c10::str("x is ", dtensor_meta(x)->spec->to_string(), ", and a token is sent whole"),
                            "redistribute x so that it is cut along its tokens: {Shard(0)}"});
  }
  if (!holds_twice(x, experts)) return;
  raise<c10::ValueError>({kMoe,
                          c10::str("x is ", dtensor_meta(x)->spec->to_string(), ": several ranks of ",
                                   experts.to_string(), " have the same tokens, and experts would get them from each"),
                          "redistribute x so that it is cut along its tokens: {Shard(0)}"});
}

at::Tensor run(const at::Tensor& x, const at::Tensor& logits, const LocalExperts& local, const MoeOptions& options) {
  check_defined(x, logits);
  if (is_dtensor(x) != is_dtensor(logits)) {
    raise<c10::TypeError>({kMoe,
                           c10::str(is_dtensor(x) ? "x" : "logits", " is a DTensor and ",
                                    is_dtensor(x) ? "logits are" : "x is", " plain"),
                           "pass both as DTensors, or both as this rank's own: to_local()"});
  }
  const DeviceMesh mesh = detail::checked_expert_mesh(kMoe, options.mesh);
  if (!is_dtensor(x)) return run_local(x, logits, mesh, local, options);
  const DTensor whole(x);
  check_placed(whole, mesh);
  DTensor scores(logits);
  // Rows of flat logits are cut otherwise, unless they are in the same places by chance: run_local compares.
  if (logits.dim() == x.dim() && scores.device_mesh() == whole.device_mesh()) {
    scores = scores.redistribute(whole.placements());
  }
  if (!(scores.device_mesh() == whole.device_mesh() && scores.placements() == whole.placements())) {
    raise<c10::ValueError>({kMoe,
                            c10::str("x is ", dtensor_meta(x)->spec->to_string(), " and logits are ",
                                     dtensor_meta(logits)->spec->to_string()),
                            "let logits lie as x does, with the same dims but for the last"});
  }
  const at::Tensor result = run_local(whole.to_local(), scores.to_local(), mesh, local, options);
  return DTensor::from_local(
      result, whole.device_mesh(), whole.placements(),
      {.shape = Sizes(x.sizes().begin(), x.sizes().end()), .stride = Sizes(x.strides().begin(), x.strides().end())});
}

// Whether one of their parameters requires a gradient; all are this rank's own.
bool check_parameters(const std::vector<torch::nn::AnyModule>& experts, const DeviceMesh& mesh) {
  bool train = false;
  for (size_t i = 0; i < experts.size(); ++i) {
    for (const at::Tensor& parameter : experts[i].ptr()->parameters()) {
      train |= parameter.requires_grad();
      detail::check_own(kMoe, c10::str("a parameter of this rank's expert ", i), parameter, mesh);
    }
  }
  return train;
}

at::Tensor run_modules(std::vector<torch::nn::AnyModule> experts, const DispatchedTokens& dispatched,
                       const at::Tensor& weights) {
  const std::vector<at::Tensor> tokens = dispatched.tokens.split_with_sizes(dispatched.counts);
  const int64_t first = dispatched.way->mesh.get_local_rank() * int64_t(experts.size());
  std::vector<at::Tensor> results;
  for (size_t i = 0; i < experts.size(); ++i) {
    results.push_back(experts[i].forward(tokens[i]));
    detail::check_result(kMoe, c10::str("expert ", first + int64_t(i), " gave"), results.back(), dispatched.counts[i],
                         dispatched.tokens.size(1));
  }
  return detail::combine(results, dispatched, weights);
}

// Of a part of the experts, or of a sum, there is no softmax.
void check_whole_rows(const char* where, const at::Tensor& logits) {
  if (!is_dtensor(logits)) return;
  for (const Placement& placement : DTensor(logits).placements()) {
    if (!placement.is_partial() && !(placement.is_shard() && placement.dim() == logits.dim() - 1)) continue;
    raise<c10::ValueError>({where, c10::str("logits are ", dtensor_meta(logits)->spec->to_string()),
                            "redistribute them so that each rank has whole rows: {Shard(0)}"});
  }
}

}  // namespace

at::Tensor moe(const at::Tensor& x, const at::Tensor& logits, const std::vector<torch::nn::AnyModule>& experts,
               MoeOptions options) {
  for (const torch::nn::AnyModule& expert : experts) {
    if (!expert.is_empty()) continue;
    raise<c10::ValueError>({kMoe, "an AnyModule among the experts is empty", "pass AnyModule(module)"});
  }
  return run(x, logits,
             {.count = int64_t(experts.size()),
              .train = check_parameters(experts, detail::checked_expert_mesh(kMoe, options.mesh)),
              .run = [&](const DispatchedTokens& dispatched,
                         const at::Tensor& weights) { return run_modules(experts, dispatched, weights); }},
             options);
}

at::Tensor moe(const at::Tensor& x, const at::Tensor& logits, const ExpertFunction& experts, MoeOptions options) {
  if (!experts) raise<c10::ValueError>({kMoe, "the function of the experts is empty", "pass a lambda"});
  const auto compute = [&](const DispatchedTokens& dispatched, const at::Tensor& weights) {
    const at::Tensor results = experts(dispatched);
    detail::check_result(kMoe, "the function of the experts gave", results, dispatched.tokens.size(0),
                         dispatched.tokens.size(1));
    return detail::combine_grouped(results, dispatched, weights);
  };
  return run(x, logits, {.count = {}, .train = true, .run = compute}, options);
}

at::Tensor load_balancing_loss(const at::Tensor& logits, const MoeLoad& load, LoadBalancingOptions options) {
  constexpr const char* where = "load_balancing_loss";
  if (!logits.defined() || !load.tokens_per_expert.defined() || logits.dim() < 2 ||
      logits.size(-1) != load.tokens_per_expert.numel()) {
    raise<c10::ValueError>({where,
                            c10::str("logits are ", logits.defined() ? watch::describe_tensor(logits) : "undefined",
                                     " and the load is of ",
                                     load.tokens_per_expert.defined() ? load.tokens_per_expert.numel() : 0, " experts"),
                            "pass the logits of a call of moe and the load that it filled"});
  }
  const DeviceMesh mesh = options.mesh ? *options.mesh : detail::checked_expert_mesh(where, {});
  detail::check_in_mesh(where, mesh);
  const int64_t num_experts = logits.size(-1);
  check_whole_rows(where, logits);
  const at::Tensor local = is_dtensor(logits) ? DTensor(logits).to_local() : logits;
  const at::Tensor probabilities = at::softmax(local, -1, at::kDouble).flatten(0, -2).sum(0);
  const at::Tensor num_tokens =
      at::full({1}, local.numel() / num_experts, probabilities.options().requires_grad(false));
  const at::Tensor mine = at::cat({probabilities, load.tokens_per_expert.to(at::kDouble), num_tokens});
  const at::Tensor all = mesh.size() == 1 ? mine : all_reduce(mine, detail::whole_group(mesh));
  const at::Tensor mean = all.narrow(0, 0, num_experts) / all.narrow(0, 2 * num_experts, 1).clamp_min(1);
  const at::Tensor chosen = all.narrow(0, num_experts, num_experts).detach();
  const at::Tensor share = chosen / chosen.sum().clamp_min(1);
  const bool is_low = logits.scalar_type() == at::kHalf || logits.scalar_type() == at::kBFloat16;
  return ((mean * share).sum() * double(num_experts)).to(is_low ? at::kFloat : logits.scalar_type());
}

}  // namespace serried
