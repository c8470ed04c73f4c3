// One sort by expert tells where each token goes; one all_to_all takes them there, another one brings results back.
#include "serried/parallel/expert_parallel/dispatch.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cmath>

#include "serried/base/error.h"
#include "serried/comm/collectives/checks.h"
#include "serried/comm/collectives/ops.h"
#include "serried/comm/collectives/watch.h"
#include "serried/parallel/expert_parallel/token_way.h"
#include "serried/tape/recorder.h"
#include "serried/tensor/making/gradient.h"

namespace serried {
namespace detail {
namespace {

// Choices by expert. Rows that travel are called slots; -1 is none.
struct SortedChoices {
  at::Tensor choice_of_slot;  // [slots]
  at::Tensor slot_of_choice;  // [choices of all tokens]
  at::Tensor counts;          // [experts]
  at::Tensor num_in_range;    // no dims
};

// Fixed shapes: nothing here depends on where the choices go, but for values.
SortedChoices order_by_expert(const at::Tensor& choices, int64_t num_experts, std::optional<int64_t> slots) {
  const at::NoGradGuard no_grad;
  const auto [experts, order] = at::sort(choices, /*stable=*/true, /*dim=*/0, /*descending=*/false);
  const at::Tensor bounds = at::searchsorted(experts, at::arange(num_experts + 1, choices.options()));
  const at::Tensor starts = bounds.narrow(0, 0, num_experts);
  SortedChoices result{.choice_of_slot = order,
                       .slot_of_choice = at::empty_like(order),
                       .counts = bounds.diff(),
                       .num_in_range = bounds.select(0, num_experts) - bounds.select(0, 0)};
  const at::Tensor places = at::arange(choices.numel(), choices.options());
  if (!slots) {
    result.slot_of_choice.scatter_(0, order, places);
    return result;
  }
  const at::Tensor within = places - starts.index_select(0, experts.clamp(0, num_experts - 1));
  const at::Tensor has_room = (within < *slots).logical_and_(experts >= 0).logical_and_(experts < num_experts);
  result.slot_of_choice.scatter_(0, order, at::where(has_room, experts * *slots + within, -1));
  const at::Tensor columns = at::arange(*slots, choices.options()).unsqueeze(0);
  const at::Tensor from = (starts.unsqueeze(1) + columns).clamp_max_(std::max<int64_t>(choices.numel() - 1, 0));
  const at::Tensor is_filled = columns < result.counts.unsqueeze(1);
  result.choice_of_slot = at::where(is_filled, order.take(from), -1).flatten();
  return result;
}

void check_in_range(const char* where, const SortedChoices& order, const at::Tensor& choices, int64_t num_experts,
                    bool may_read) {
  if (!may_read) {
    at::_assert_async(order.num_in_range == choices.numel(),
                      format_error({where, "a choice is none of the experts", "pass numbers from 0 on"}));
    return;
  }
  if (order.num_in_range.item<int64_t>() == choices.numel()) return;
  raise<c10::ValueError>({where,
                          c10::str("choices go from ", choices.min().item<int64_t>(), " to ",
                                   choices.max().item<int64_t>(), ", and experts from 0 to ", num_experts - 1),
                          "pass numbers of experts, less than num_experts"});
}

at::Tensor rows_or_zeros(const at::Tensor& source, const RowMap& map) {
  at::Tensor rows = source.index_select(0, map.index);
  return map.is_none.defined() ? rows.masked_fill_(map.is_none, 0) : rows;
}

// Rows of `source` as `there` has them. `back` is who takes each row again, `num_each` of them for one of `source`: the
// gradient is gathered, too, where that of index_select would fill a tensor with zeros and add row by row.
at::Tensor moved_rows(const at::Tensor& source, const RowMap& there, const RowMap& back, int64_t num_each) {
  const at::Tensor rows = rows_or_zeros(source.detach(), there);
  if (!wants_gradient(source)) return rows;
  record_gradient("MovedRows", source, rows, [back, num_each](const at::Tensor& grad) {
    const at::Tensor all = rows_or_zeros(grad, back);
    return num_each == 1 ? all : all.view({all.size(0) / num_each, num_each, all.size(1)}).sum(1);
  });
  return rows;
}

RowMap row_map(const at::Tensor& index, bool has_none) {
  if (!has_none) return {index, {}};
  return {index.clamp_min(0), (index < 0).unsqueeze(1)};
}

// A fresh tensor on the same memory, of which gradients come back multiplied.
at::Tensor scaled_gradient(const at::Tensor& x, double factor) {
  if (factor == 1 || !wants_gradient(x)) return x;
  const at::Tensor same = x.detach();
  record_gradient("ScaledGradient", x, same, [factor](const at::Tensor& grad) { return grad * factor; });
  return same;
}

// `rows`, which are nobody else's, times weights that are 1 or, after a NaN of the router, NaN. The softmax that they
// come from has no gradient, so the passes over all rows that a product takes for one are spared.
struct UnitWeights : torch::autograd::Function<UnitWeights> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& rows, const at::Tensor& weights) {
    return rows.detach().mul_(weights);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list& grads) {
    return {grads[0], at::zeros({grads[0].size(0), 1}, grads[0].options().requires_grad(false))};
  }
};

// The same values, in a graph of autograd: where backward sends, it does so on every rank.
at::Tensor taking_part(const at::Tensor& x) {
  return wants_gradient(x) ? x : x.detach().requires_grad_();
}

ExpertCall expert_call(const DispatchCall& call, const at::Tensor& x, std::optional<int64_t> slots) {
  return {.where = call.where,
          .mesh = call.mesh,
          .num_experts = call.num_experts,
          .num_local = call.num_local,
          .width = x.size(-1),
          .dtype = x.scalar_type(),
          .slots = slots,
          .wants_gradient = wants_gradient(x),
          .trains = call.trains && at::GradMode::is_enabled()};
}

at::Tensor exchanged(const TokenWay& way, const at::Tensor& rows, bool back) {
  const Traffic& traffic = way.traffic;
  if (way.mesh.size() == 1) return rows;
  return ops::all_to_all(rows, way.mesh.get_group(), 0, 0, back ? traffic.arriving_sizes : traffic.sent_sizes,
                         back ? traffic.sent_sizes : traffic.arriving_sizes, traffic.sizes_of_all);
}

std::vector<int64_t> rows_of_experts(const Traffic& traffic) {
  std::vector<int64_t> counts(traffic.arriving[0].size());
  for (const std::vector<int64_t>& from : traffic.arriving) {
    for (size_t expert = 0; expert < counts.size(); ++expert) counts[expert] += from[expert];
  }
  return counts;
}

// What came rank after rank, expert after expert.
at::Tensor by_expert(const at::Tensor& rows, const Traffic& traffic) {
  const size_t num_ranks = traffic.arriving.size(), num_local = traffic.arriving[0].size();
  if (num_ranks == 1 || num_local == 1) return rows;
  std::vector<int64_t> sizes;
  for (const std::vector<int64_t>& from : traffic.arriving) sizes.insert(sizes.end(), from.begin(), from.end());
  const std::vector<at::Tensor> pieces = rows.split_with_sizes(sizes);
  std::vector<at::Tensor> ordered;
  for (size_t expert = 0; expert < num_local; ++expert) {
    for (size_t rank = 0; rank < num_ranks; ++rank) ordered.push_back(pieces[rank * num_local + expert]);
  }
  return at::cat(ordered);
}

// The way back, by one copy.
at::Tensor by_rank(const std::vector<at::Tensor>& results, const Traffic& traffic) {
  if (results.size() == 1) return results[0];
  std::vector<std::vector<at::Tensor>> pieces;
  for (size_t expert = 0; expert < results.size(); ++expert) {
    std::vector<int64_t> sizes;
    for (const std::vector<int64_t>& from : traffic.arriving) sizes.push_back(from[expert]);
    pieces.push_back(results[expert].split_with_sizes(sizes));
  }
  std::vector<at::Tensor> ordered;
  for (size_t rank = 0; rank < traffic.arriving.size(); ++rank) {
    for (const std::vector<at::Tensor>& of_expert : pieces) ordered.push_back(of_expert[rank]);
  }
  return at::cat(ordered);
}

void refuse_capture(const char* where) {
  raise<c10::NotImplementedError>(
      {where, "without a capacity the number of rows depends on the tokens, and a captured function has fixed shapes",
       "pass a capacity, such as {.capacity = 1.25}, or call it outside of the captured function"});
}

void check_choices(const at::Tensor& x, const at::Tensor& experts) {
  constexpr const char* where = "dispatch_tokens";
  const bool is_right = x.dim() >= 2 && experts.dim() == x.dim() && experts.size(-1) > 0 &&
                        experts.sizes().slice(0, size_t(experts.dim()) - 1) == x.sizes().slice(0, size_t(x.dim()) - 1);
  if (!is_right) {
    raise<c10::ValueError>(
        {where,
         c10::str("tokens are ", watch::describe_tensor(x), " and their experts ", watch::describe_tensor(experts)),
         "pass tokens [..., features] and experts [..., choices] with the same dims before"});
  }
  if (experts.scalar_type() != at::kLong) {
    raise<c10::TypeError>({where, c10::str("experts are ", watch::describe_tensor(experts), ", not numbers of experts"),
                           "pass int64, as topk and argmax give them"});
  }
}

}  // namespace

std::optional<int64_t> slots_for(const char* where, std::optional<double> capacity, int64_t num_tokens,
                                 int64_t num_choices, int64_t num_experts) {
  if (!capacity) return std::nullopt;
  if (!(*capacity > 0) || !std::isfinite(*capacity)) {
    raise<c10::ValueError>({where, c10::str("capacity is ", *capacity),
                            "pass a positive number: 1 is room for an even share; or none, to drop nothing"});
  }
  const double slots = std::ceil(*capacity * double(num_tokens) * double(num_choices) / double(num_experts));
  return int64_t(std::min(slots, double(num_tokens * num_choices)));
}

DispatchedTokens dispatch(const DispatchCall& call, const at::Tensor& x, const at::Tensor& experts,
                          const DispatchOptions& options) {
  const int64_t num_choices = experts.size(-1), num_tokens = experts.numel() / num_choices;
  const std::optional<int64_t> slots =
      slots_for(call.where, options.capacity, num_tokens, num_choices, call.num_experts);
  if (!slots && tape::is_replayed()) refuse_capture(call.where);
  const at::Tensor choices = experts.reshape({num_tokens * num_choices});
  const SortedChoices order = order_by_expert(choices, call.num_experts, slots);
  if (!call.is_in_range) check_in_range(call.where, order, choices, call.num_experts, !slots);
  auto way = std::make_shared<TokenWay>(TokenWay{.mesh = call.mesh,
                                                 .traffic = agree_on_traffic(expert_call(call, x, slots), order.counts),
                                                 .sizes = x.sizes().vec(),
                                                 .dtype = x.scalar_type(),
                                                 .num_choices = num_choices,
                                                 .slot_of_choice = row_map(order.slot_of_choice, slots.has_value()),
                                                 .choice_of_slot = row_map(order.choice_of_slot, slots.has_value()),
                                                 .averages = options.average_gradients,
                                                 .has_unit_weights = call.has_unit_weights});
  RowMap token_of_slot = way->choice_of_slot;
  if (num_choices > 1) token_of_slot.index = token_of_slot.index.div(num_choices, "floor");
  const at::Tensor flat = x.reshape({num_tokens, x.size(-1)});
  const at::Tensor source = way->traffic.tokens_need_gradient ? taking_part(flat) : flat;
  const at::Tensor sent = moved_rows(source, token_of_slot, way->slot_of_choice, num_choices);
  const at::Tensor rows = exchanged(*way, sent, /*back=*/false);
  const double num_ranks = options.average_gradients ? double(call.mesh.size()) : 1;
  return {.tokens = scaled_gradient(by_expert(rows, way->traffic), num_ranks),
          .counts = rows_of_experts(way->traffic),
          .tokens_per_expert = order.counts,
          .dropped = slots ? way->slot_of_choice.is_none.sum() : at::zeros({}, choices.options()),
          .way = way};
}

at::Tensor combine(const std::vector<at::Tensor>& results, const DispatchedTokens& dispatched,
                   const at::Tensor& weights) {
  const TokenWay& way = *dispatched.way;
  at::Tensor rows = by_rank(results, way.traffic).to(way.dtype);
  // Experts that got nothing may have been passed over, and the backward of the dispatch starts at what they got.
  if (rows.size(0) == 0) rows = rows + dispatched.tokens.to(way.dtype);
  if (way.traffic.results_need_gradient) rows = taking_part(rows);
  const double num_ranks = way.averages ? double(way.mesh.size()) : 1;
  const at::Tensor back = exchanged(way, scaled_gradient(rows, 1 / num_ranks), /*back=*/true);
  const int64_t width = way.sizes.back(), num_tokens = way.slot_of_choice.index.numel() / way.num_choices;
  const at::Tensor chosen = moved_rows(back, way.slot_of_choice, way.choice_of_slot, 1);
  if (way.has_unit_weights) {
    return UnitWeights::apply(chosen, weights.reshape({num_tokens, 1}).to(way.dtype)).view(way.sizes);
  }
  const at::Tensor weighted =
      chosen.view({num_tokens, way.num_choices, width}) * weights.reshape({num_tokens, way.num_choices, 1});
  return (way.num_choices == 1 ? weighted.squeeze(1) : weighted.sum(1)).to(way.dtype).view(way.sizes);
}

at::Tensor combine_grouped(const at::Tensor& results, const DispatchedTokens& dispatched, const at::Tensor& weights) {
  const bool is_in_order = dispatched.way->mesh.size() == 1;
  return combine(is_in_order ? std::vector<at::Tensor>{results} : results.split_with_sizes(dispatched.counts),
                 dispatched, weights);
}

void check_result(const char* where, const std::string& gave, const at::Tensor& result, int64_t num_rows,
                  int64_t width) {
  if (result.defined() && is_dist_tensor(result)) {
    raise<c10::TypeError>({where, c10::str(gave, " a DTensor ", watch::describe_tensor(result)),
                           "give this rank's plain rows: d.to_local() or d.full_tensor()"});
  }
  if (result.defined() && result.dim() == 2 && result.size(0) == num_rows && result.size(1) == width) return;
  raise<c10::ValueError>(
      {where,
       c10::str(gave, " ", result.defined() ? watch::describe_tensor(result) : std::string("nothing"), " for ",
                num_rows, " tokens of ", width, " features"),
       "give one row for each token, as wide as a token"});
}

}  // namespace detail

DispatchedTokens dispatch_tokens(const at::Tensor& x, const at::Tensor& experts, int64_t num_experts,
                                 DispatchOptions options) {
  constexpr const char* where = "dispatch_tokens";
  for (const at::Tensor& t : {x, experts}) {
    if (!t.defined()) raise<c10::ValueError>({where, "a tensor is undefined", "pass tokens and their experts"});
    detail::check_not_distributed(where, t);
  }
  detail::check_choices(x, experts);
  const DeviceMesh mesh = detail::checked_expert_mesh(where, options.mesh);
  if (num_experts <= 0 || num_experts % mesh.size() != 0) {
    raise<c10::ValueError>({where,
                            c10::str(num_experts, " experts cannot be dealt out to the ", mesh.size(), " ranks of ",
                                     mesh.to_string(), " in equal numbers"),
                            "pass a multiple of the number of ranks"});
  }
  const detail::DispatchCall call{.where = where,
                                  .mesh = mesh,
                                  .num_experts = num_experts,
                                  .num_local = num_experts / mesh.size(),
                                  .trains = true,
                                  .is_in_range = false};
  return detail::dispatch(call, x, experts, options);
}

at::Tensor combine_tokens(const at::Tensor& results, const DispatchedTokens& dispatched, const at::Tensor& weights) {
  constexpr const char* where = "combine_tokens";
  if (!dispatched.way) raise<c10::ValueError>({where, "nothing was dispatched", "pass what dispatch_tokens gave"});
  const detail::TokenWay& way = *dispatched.way;
  detail::check_result(where, "results are", results, dispatched.tokens.size(0), way.sizes.back());
  std::vector<int64_t> sizes = way.sizes;
  sizes.back() = way.num_choices;
  if (!weights.defined() || weights.sizes() != sizes || detail::is_dist_tensor(weights)) {
    raise<c10::ValueError>(
        {where,
         c10::str("weights are ", weights.defined() ? watch::describe_tensor(weights) : std::string("undefined"),
                  ", and there are ", way.num_choices, " choices for each of the tokens ",
                  c10::str(c10::IntArrayRef(way.sizes))),
         "pass plain weights of the sizes that the experts had in dispatch_tokens"});
  }
  return detail::combine_grouped(results, dispatched, weights);
}

}  // namespace serried
