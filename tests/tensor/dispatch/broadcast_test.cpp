// Ops of three tensors and more whose inputs broadcast against each other, in all placements, uneven and empty parts.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tests/support/close.h"
#include "tests/support/errors.h"
#include "tests/support/on_mesh.h"
#include "tests/support/tensor_programs.h"

namespace serried::testing {
namespace {

using T = at::Tensor;
using Tensors = std::vector<T>;

struct BroadcastCase {
  const char* name;
  std::function<T(const Tensors&)> run;
  std::vector<std::vector<Sizes>> shapes;  // of the inputs
  bool in_place = false;                   // the first is written
};

const std::vector<std::vector<Sizes>>& three() {
  static const std::vector<std::vector<Sizes>> shapes = {
      {{5, 3}, {5, 3}, {5, 3}}, {{5, 3}, {3}, {5, 1}},       {{1, 3}, {5, 1}, {1, 1}}, {{3}, {5, 1}, {1}},
      {{5, 1}, {1, 3}, {}},     {{}, {3}, {5, 1}},           {{1}, {1}, {5, 3}},       {{2, 1, 3}, {5, 1}, {2, 5, 1}},
      {{5, 1}, {2, 1, 1}, {3}}, {{1, 1}, {1, 1, 1}, {1, 1}}, {{3, 1}, {3, 1}, {3, 2}}, {{0, 3}, {1, 3}, {3}},
  };
  return shapes;
}

// The first has the whole shape.
const std::vector<std::vector<Sizes>>& into_first() {
  static const std::vector<std::vector<Sizes>> shapes = {{{5, 3}, {5, 3}, {5, 3}}, {{5, 3}, {3}, {5, 1}},
                                                         {{5, 3}, {1, 1}, {}},     {{2, 5, 3}, {5, 1}, {2, 1, 3}},
                                                         {{1, 3}, {1, 3}, {3}},    {{5, 1}, {1}, {5, 1}}};
  return shapes;
}

const std::vector<std::vector<Sizes>>& two() {
  static const std::vector<std::vector<Sizes>> shapes = {{{5, 3}, {3}}, {{5, 1}, {1, 3}},    {{1}, {5, 3}},
                                                         {{}, {3}},     {{2, 1, 3}, {5, 1}}, {{3, 1}, {1, 1, 1}}};
  return shapes;
}

c10::List<std::optional<T>> list_of(std::initializer_list<T> tensors) {
  c10::List<std::optional<T>> list;
  for (const T& t : tensors) list.push_back(t.defined() ? std::optional<T>(t) : std::nullopt);
  return list;
}

T index_below(const T& t, int64_t n) {
  return (t.abs() * 100).to(at::kLong).remainder(n);
}

std::vector<BroadcastCase> pointwise_cases() {
  return {
      {"addcmul", [](const Tensors& t) { return at::addcmul(t[0], t[1], t[2], 0.5); }, three()},
      {"addcdiv", [](const Tensors& t) { return at::addcdiv(t[0], t[1], t[2].abs() + 1, 0.5); }, three()},
      {"where", [](const Tensors& t) { return at::where(t[0] > 0, t[1], t[2]); }, three()},
      {"where with a number", [](const Tensors& t) { return at::where(t[0] > 0, t[1], 2.0); }, two()},
      {"lerp", [](const Tensors& t) { return at::lerp(t[0], t[1], t[2]); }, three()},
      {"clamp", [](const Tensors& t) { return at::clamp(t[0], t[1], t[2]); }, three()},
      {"clamp min", [](const Tensors& t) { return at::clamp(t[0], t[1], std::nullopt); }, two()},
      {"clamp max", [](const Tensors& t) { return at::clamp_max(t[0], t[1]); }, two()},
      {"masked_fill", [](const Tensors& t) { return at::masked_fill(t[0], t[1] > 0, 3.0); }, two()},
      {"masked_fill tensor", [](const Tensors& t) { return at::masked_fill(t[0], t[1] > 0, t[2].sum()); }, three()},
      {"addcmul_", [](const Tensors& t) { return T(t[0]).addcmul_(t[1], t[2]); }, into_first(), true},
      {"addcdiv_", [](const Tensors& t) { return T(t[0]).addcdiv_(t[1], t[2].abs() + 1); }, into_first(), true},
      {"lerp_", [](const Tensors& t) { return T(t[0]).lerp_(t[1], t[2]); }, into_first(), true},
      {"clamp_", [](const Tensors& t) { return T(t[0]).clamp_(t[1], t[2]); }, into_first(), true},
      {"masked_fill_", [](const Tensors& t) { return T(t[0]).masked_fill_(t[1] > 0, 3.0); }, into_first(), true},
      {"masked_scatter",
       [](const Tensors& t) {
         return at::masked_scatter(t[0], t[1] > 0, at::cat({t[0].flatten(), t[0].flatten()}));
       },
       into_first()},
      {"where_ copy", [](const Tensors& t) { return T(t[0]).copy_(at::where(t[1] > 0, t[1], t[2])); }, into_first(),
       true},
      {"prelu",
       [](const Tensors& t) { return at::prelu(t[0], t[1]); },
       {{{5, 3}, {3}}, {{5, 3}, {1}}, {{2, 3, 4}, {3}}, {{4}, {1}}}},
      {"bce",
       [](const Tensors& t) { return at::binary_cross_entropy(t[0].sigmoid(), t[1].sigmoid(), t[2].abs()); },
       {{{5, 3}, {5, 3}, {3}}, {{5, 3}, {5, 3}, {5, 1}}, {{5, 3}, {5, 3}, {}}}},
      {"bce none",
       [](const Tensors& t) { return at::binary_cross_entropy(t[0].sigmoid(), t[1].sigmoid(), t[2].abs(), 0); },
       {{{5, 3}, {5, 3}, {3}}, {{5, 3}, {5, 3}, {5, 1}}}},
      {"bce logits",
       [](const Tensors& t) {
         return at::binary_cross_entropy_with_logits(t[0], t[1].sigmoid(), t[2].abs(), t[3].abs());
       },
       {{{5, 3}, {5, 3}, {3}, {5, 1}},
        {{5, 3}, {5, 3}, {}, {1}},
        {{1, 3}, {5, 3}, {3}, {3}},
        {{5, 1}, {5, 3}, {5, 1}, {3}},
        {{5, 3}, {5, 3}, {5, 1}, {3}}}},
      {"bce logits sum",
       [](const Tensors& t) {
         return at::binary_cross_entropy_with_logits(t[0], t[1].sigmoid(), t[2].abs(), t[3].abs(), 2);
       },
       {{{1, 3}, {5, 3}, {3}, {3}}, {{5, 3}, {5, 3}, {5, 1}, {3}}}},
      {"mse", [](const Tensors& t) { return at::mse_loss(t[0], t[1]); }, two()},
      {"huber", [](const Tensors& t) { return at::huber_loss(t[0], t[1]); }, two()},
      {"smooth_l1", [](const Tensors& t) { return at::smooth_l1_loss(t[0], t[1]); }, two()},
      {"soft_margin", [](const Tensors& t) { return at::soft_margin_loss(t[0], t[1].sign()); }, {{{5, 3}, {5, 3}}}},
      {"kl_div", [](const Tensors& t) { return at::kl_div(t[0], t[1].abs()); }, two()},
      {"poisson_nll", [](const Tensors& t) { return at::poisson_nll_loss(t[0], t[1].abs() + 1, true, true, 1e-8, 1); },
       two()},
      {"triplet",
       [](const Tensors& t) { return at::triplet_margin_loss(t[0], t[1], t[2]); },
       {{{5, 3}, {5, 3}, {5, 3}}, {{1, 3}, {5, 3}, {5, 3}}, {{5, 3}, {1, 3}, {5, 3}}}},
      {"margin_ranking",
       [](const Tensors& t) { return at::margin_ranking_loss(t[0], t[1], t[2].sign()); },
       {{{5, 3}, {5, 3}, {5, 3}}, {{5, 3}, {1, 3}, {3}}}},
      {"cosine_embedding",
       [](const Tensors& t) { return at::cosine_embedding_loss(t[0], t[1], t[2].sign()); },
       {{{5, 3}, {5, 3}, {5}}}},
  };
}

std::vector<BroadcastCase> product_cases() {
  return {
      {"addmm",
       [](const Tensors& t) { return at::addmm(t[0], t[1], t[2], 0.5, 2); },
       {{{5, 3}, {5, 4}, {4, 3}},
        {{3}, {5, 4}, {4, 3}},
        {{5, 1}, {5, 4}, {4, 3}},
        {{1, 3}, {5, 4}, {4, 3}},
        {{}, {5, 4}, {4, 3}},
        {{1}, {1, 4}, {4, 1}}}},
      {"_addmm_activation",
       [](const Tensors& t) { return at::_addmm_activation(t[0], t[1], t[2]); },
       {{{3}, {5, 4}, {4, 3}}}},
      {"addmv",
       [](const Tensors& t) { return at::addmv(t[0], t[1], t[2]); },
       {{{5}, {5, 4}, {4}}, {{1}, {5, 4}, {4}}, {{}, {5, 4}, {4}}}},
      {"addr",
       [](const Tensors& t) { return at::addr(t[0], t[1], t[2]); },
       {{{5, 3}, {5}, {3}}, {{3}, {5}, {3}}, {{5, 1}, {5}, {3}}, {{1, 3}, {5}, {3}}, {{}, {5}, {3}}}},
      {"baddbmm",
       [](const Tensors& t) { return at::baddbmm(t[0], t[1], t[2]); },
       {{{2, 5, 3}, {2, 5, 4}, {2, 4, 3}},
        {{3}, {2, 5, 4}, {2, 4, 3}},
        {{5, 1}, {2, 5, 4}, {2, 4, 3}},
        {{2, 1, 1}, {2, 5, 4}, {2, 4, 3}},
        {{1, 5, 3}, {2, 5, 4}, {2, 4, 3}},
        {{}, {2, 5, 4}, {2, 4, 3}}}},
      {"addbmm",
       [](const Tensors& t) { return at::addbmm(t[0], t[1], t[2]); },
       {{{5, 3}, {2, 5, 4}, {2, 4, 3}},
        {{3}, {2, 5, 4}, {2, 4, 3}},
        {{5, 1}, {2, 5, 4}, {2, 4, 3}},
        {{}, {2, 5, 4}, {2, 4, 3}}}},
      {"linear",
       [](const Tensors& t) { return at::linear(t[0], t[1], t[2]); },
       {{{5, 4}, {3, 4}, {3}}, {{2, 5, 4}, {3, 4}, {3}}, {{4}, {3, 4}, {3}}, {{5, 4}, {1, 4}, {1}}}},
      {"bilinear",
       [](const Tensors& t) { return at::bilinear(t[0], t[1], t[2], t[3]); },
       {{{5, 2}, {5, 3}, {4, 2, 3}, {4}}}},
      {"matmul",
       [](const Tensors& t) { return at::matmul(t[0], t[1]); },
       {{{2, 1, 5, 4}, {3, 4, 2}}, {{1, 5, 4}, {3, 4, 2}}, {{5, 4}, {2, 4, 3}}, {{4}, {2, 4, 3}}, {{2, 5, 4}, {4}}}},
      {"einsum",
       [](const Tensors& t) {
         return at::einsum("...ij,...jk->...ik", {t[0], t[1]});
       },
       {{{2, 1, 5, 4}, {3, 4, 2}}}},
      {"attention with mask",
       [](const Tensors& t) { return at::scaled_dot_product_attention(t[0], t[1], t[2], t[3]); },
       {{{2, 3, 5, 4}, {2, 3, 6, 4}, {2, 3, 6, 4}, {5, 6}},
        {{2, 3, 5, 4}, {2, 3, 6, 4}, {2, 3, 6, 4}, {2, 1, 5, 6}},
        {{2, 3, 5, 4}, {2, 3, 6, 4}, {2, 3, 6, 4}, {1, 3, 5, 6}},
        {{2, 3, 5, 4}, {2, 3, 6, 4}, {2, 3, 6, 4}, {2, 3, 1, 6}},
        {{2, 3, 5, 4}, {1, 3, 6, 4}, {1, 3, 6, 4}, {5, 1}},
        {{2, 3, 5, 4}, {2, 1, 6, 4}, {2, 1, 6, 4}, {2, 3, 5, 6}}}},
      {"flash with mask",
       [](const Tensors& t) {
         return std::get<0>(at::_scaled_dot_product_flash_attention_for_cpu(t[0], t[1], t[2], 0, false, t[3]));
       },
       {{{2, 3, 5, 4}, {2, 3, 6, 4}, {2, 3, 6, 4}, {5, 6}},
        {{2, 3, 5, 4}, {2, 3, 6, 4}, {2, 3, 6, 4}, {2, 1, 5, 6}},
        {{2, 3, 5, 4}, {2, 3, 6, 4}, {2, 3, 6, 4}, {1, 1, 5, 6}},
        {{2, 3, 5, 4}, {2, 3, 6, 4}, {2, 3, 6, 4}, {2, 3, 1, 6}}}},
      {"linalg_solve",
       [](const Tensors& t) {
         return at::linalg_solve(t[0] + 5 * at::eye(3, at::kDouble).sum() * 0 + t[0].mT().matmul(t[0]) * 3, t[1]);
       },
       {{{3, 3}, {2, 3, 2}}, {{2, 3, 3}, {3, 2}}, {{2, 1, 3, 3}, {4, 3, 2}}, {{2, 3, 3}, {2, 3}}}},
      {"cholesky_solve",
       [](const Tensors& t) { return at::cholesky_solve(t[0], at::linalg_cholesky(t[1].matmul(t[1].mT()))); },
       {{{3, 2}, {2, 3, 3}}, {{2, 3, 2}, {3, 3}}, {{2, 1, 3, 2}, {4, 3, 3}}}},
      {"lu_solve",
       [](const Tensors& t) {
         const auto [lu, pivots] = at::linalg_lu_factor(t[0]);
         return at::linalg_lu_solve(lu, pivots, t[1]);
       },
       {{{3, 3}, {2, 3, 2}}, {{2, 3, 3}, {1, 3, 2}}, {{2, 1, 3, 3}, {4, 3, 2}}}},
      {"ldl_solve",
       [](const Tensors& t) {
         const auto [ld, pivots] = at::linalg_ldl_factor(t[0].matmul(t[0].mT()));
         return at::linalg_ldl_solve(ld, pivots, t[1]);
       },
       {{{3, 3}, {3, 2}}, {{2, 3, 3}, {2, 3, 2}}, {{2, 3, 3}, {3, 2}}, {{3, 3}, {2, 3, 2}}}},
      {"triangular_solve",
       [](const Tensors& t) {
         return at::linalg_solve_triangular(t[0].tril() + t[0].tril().abs().sum() * 0, t[1], false);
       },
       {{{3, 3}, {2, 3, 2}}, {{2, 3, 3}, {3, 2}}, {{2, 1, 3, 3}, {4, 3, 2}}}},
      {"triangular_solve old",
       [](const Tensors& t) {
         const auto [x, a] = at::triangular_solve(t[1], t[0].tril(), false);
         return at::cat({x, a}, -1);
       },
       {{{3, 3}, {2, 3, 2}}, {{2, 3, 3}, {3, 2}}, {{2, 1, 3, 3}, {4, 3, 2}}}},
      {"pinv with tolerances",
       [](const Tensors& t) { return at::linalg_pinv(t[0], t[1].abs() * 1e-9, t[2].abs() * 1e-9); },
       {{{2, 4, 3}, {2}, {}}, {{2, 4, 3}, {1}, {2}}, {{2, 3, 4, 3}, {3}, {2, 1}}}},
      {"cdist",
       [](const Tensors& t) { return at::cdist(t[0], t[1]); },
       {{{2, 1, 5, 3}, {4, 2, 3}}, {{5, 3}, {2, 4, 3}}}},
      {"cross",
       [](const Tensors& t) { return at::linalg_cross(t[0], t[1]); },
       {{{5, 3}, {1, 3}}, {{1, 3}, {5, 3}}, {{2, 1, 3}, {1, 5, 3}}}},
      {"vecdot", [](const Tensors& t) { return at::linalg_vecdot(t[0], t[1]); }, {{{5, 3}, {3}}, {{2, 1, 3}, {5, 3}}}},
      {"cosine_similarity",
       [](const Tensors& t) { return at::cosine_similarity(t[0], t[1], -1); },
       {{{5, 3}, {1, 3}}, {{2, 1, 3}, {5, 3}}}},
      {"pairwise_distance",
       [](const Tensors& t) { return at::pairwise_distance(t[0], t[1]); },
       {{{5, 3}, {1, 3}}, {{5, 3}, {3}}}},
  };
}

std::vector<BroadcastCase> norm_and_index_cases() {
  return {
      {"layer_norm",
       [](const Tensors& t) { return at::layer_norm(t[0], t[1].sizes(), t[1], t[2]); },
       {{{5, 3}, {3}, {3}}, {{2, 5, 3}, {5, 3}, {5, 3}}, {{1, 3}, {3}, {3}}}},
      {"rms_norm",
       [](const Tensors& t) { return at::rms_norm(t[0], t[1].sizes(), t[1]); },
       {{{5, 3}, {3}}, {{2, 5, 3}, {5, 3}}}},
      {"group_norm",
       [](const Tensors& t) { return at::group_norm(t[0], 2, t[1], t[2]); },
       {{{3, 4}, {4}, {4}}, {{1, 4, 5}, {4}, {4}}, {{3, 4, 2, 3}, {4}, {4}}}},
      {"instance_norm",
       [](const Tensors& t) { return at::instance_norm(t[0], t[1], t[2], {}, {}, true, 0.1, 1e-5, false); },
       {{{3, 4, 5}, {4}, {4}}, {{1, 4, 5}, {4}, {4}}}},
      {"batch_norm",
       [](const Tensors& t) {
         return at::batch_norm(t[0], t[1], t[2], t[3].detach(), t[4].detach().abs(), false, 0.1, 1e-5, false);
       },
       {{{3, 4}, {4}, {4}, {4}, {4}}, {{1, 4, 5}, {4}, {4}, {4}, {4}}}},
      {"batch_norm training",
       [](const Tensors& t) { return at::batch_norm(t[0], t[1], t[2], {}, {}, true, 0.1, 1e-5, false); },
       {{{3, 4}, {4}, {4}}, {{2, 4, 5}, {4}, {4}}}},
      {"index_put one",
       [](const Tensors& t) { return at::index_put(t[0], list_of({index_below(t[1], 5)}), t[2], true); },
       {{{5, 3}, {4}, {4, 3}},
        {{5, 3}, {4}, {3}},
        {{5, 3}, {4}, {4, 1}},
        {{5, 3}, {4}, {}},
        {{5, 3}, {2, 2}, {2, 2, 3}},
        {{5, 3}, {2, 2}, {2, 1, 3}},
        {{5, 3}, {2, 2}, {1, 3}},
        {{5}, {4}, {1}}}},
      {"index_put two",
       [](const Tensors& t) {
         return at::index_put(t[0], list_of({index_below(t[1], 5), index_below(t[2], 3)}), t[3], true);
       },
       {{{5, 3}, {4}, {4}, {4}},
        {{5, 3}, {4}, {1}, {4}},
        {{5, 3}, {4, 1}, {3}, {4, 3}},
        {{5, 3}, {4, 1}, {1, 3}, {1, 3}},
        {{5, 3}, {4, 1}, {1, 3}, {4, 1}},
        {{5, 3, 2}, {4, 1}, {1, 3}, {4, 1, 2}},
        {{5, 3, 2}, {1}, {3}, {2}}}},
      {"index_put apart",
       [](const Tensors& t) {
         return at::index_put(t[0], list_of({index_below(t[1], 2), T(), index_below(t[2], 3)}), t[3], true);
       },
       {{{2, 5, 3}, {4}, {4}, {4, 5}}, {{2, 5, 3}, {4}, {1}, {5}}, {{2, 5, 3}, {4, 1}, {2}, {4, 2, 1}}}},
      {"index_put mask",
       [](const Tensors& t) { return at::index_put(t[0], list_of({t[1] > 0}), t[2].sum()); },
       {{{5, 3}, {5}, {1}}, {{5, 3}, {5, 3}, {1}}}},
      {"index two",
       [](const Tensors& t) {
         return at::index(t[0], list_of({index_below(t[1], 5), index_below(t[2], 3)}));
       },
       {{{5, 3}, {4}, {4}}, {{5, 3}, {4}, {1}}, {{5, 3}, {4, 1}, {3}}, {{5, 3, 2}, {1, 4}, {2, 1}}}},
      {"index apart",
       [](const Tensors& t) {
         return at::index(t[0], list_of({index_below(t[1], 2), T(), index_below(t[2], 3)}));
       },
       {{{2, 5, 3}, {4}, {4}}, {{2, 5, 3}, {4, 1}, {2}}}},
      {"take_along_dim",
       [](const Tensors& t) { return at::take_along_dim(t[0], index_below(t[1], 5), 0); },
       {{{5, 3}, {2, 3}}, {{5, 3}, {2, 1}}, {{5, 1}, {2, 3}}}},
      {"bucketize",
       [](const Tensors& t) { return at::bucketize(t[0], std::get<0>(t[1].sort())); },
       {{{5, 3}, {4}}, {{}, {4}}, {{5}, {1}}}},
      {"searchsorted",
       [](const Tensors& t) { return at::searchsorted(std::get<0>(t[0].sort()), t[1]); },
       {{{4}, {5, 3}}, {{5, 4}, {5, 2}}, {{2, 5, 4}, {2, 5, 1}}}},
      {"isin",
       [](const Tensors& t) { return at::isin(index_below(t[0], 4), index_below(t[1], 3)); },
       {{{5, 3}, {2}}, {{5}, {1, 3}}}},
      {"scatter_add",
       [](const Tensors& t) { return at::scatter_add(t[0], 0, index_below(t[1], 5), t[2]); },
       {{{5, 3}, {2, 3}, {4, 3}}, {{5, 3}, {2, 2}, {2, 2}}, {{5}, {3}, {4}}}},
      {"index_add",
       [](const Tensors& t) { return at::index_add(t[0], 0, index_below(t[1], 5), t[2]); },
       {{{5, 3}, {4}, {4, 3}}, {{5}, {3}, {3}}}},
      {"cross_entropy weights",
       [](const Tensors& t) { return at::cross_entropy_loss(t[0], index_below(t[1], 3), t[2].abs()); },
       {{{5, 3}, {5}, {3}}, {{2, 3, 4}, {2, 4}, {3}}, {{1, 3}, {1}, {3}}}},
      {"embedding_bag",
       [](const Tensors& t) {
         return std::get<0>(at::embedding_bag(t[0], index_below(t[1], 5), at::zeros_like(t[2]).to(at::kLong)));
       },
       {{{5, 3}, {4}, {1}}}},
      {"dist", [](const Tensors& t) { return at::dist(t[0], t[1]); }, two()},
      {"isclose", [](const Tensors& t) { return at::isclose(t[0], t[1]); }, two()},
      {"meshgrid",
       [](const Tensors& t) {
         return at::meshgrid({t[0], t[1], t[2]}, "ij")[1] + 0;
       },
       {{{5}, {3}, {2}}, {{1}, {3}, {}}}},
      {"broadcast_tensors",
       [](const Tensors& t) {
         const auto b = at::broadcast_tensors({t[0], t[1], t[2]});
         return b[0] + b[2];
       },
       three()},
      {"cartesian_prod",
       [](const Tensors& t) {
         return at::cartesian_prod({t[0], t[1]});
       },
       {{{5}, {3}}, {{1}, {3}}}},
      {"block_diag",
       [](const Tensors& t) {
         return at::block_diag({t[0], t[1], t[2]});
       },
       {{{5, 3}, {3}, {}}}},
      {"tensordot",
       [](const Tensors& t) { return at::tensordot(t[0], t[1], {1}, {0}); },
       {{{5, 3}, {3, 2}}, {{5, 3, 2}, {3, 4}}}},
      {"grid_sampler",
       [](const Tensors& t) { return at::grid_sampler(t[0], t[1].tanh(), 0, 0, false); },
       {{{2, 3, 4, 4}, {2, 3, 3, 2}}}},
  };
}

Tensors make_inputs(const std::vector<Sizes>& shapes, uint64_t seed) {
  Dice dice(seed);
  Tensors inputs;
  for (const Sizes& sizes : shapes) inputs.push_back(dice.normal(sizes));
  return inputs;
}

Placements some_placements(Dice& dice, int64_t ndim, size_t axes) {
  Placements placements;
  for (size_t axis = 0; axis < axes; ++axis) {
    const int64_t choice = dice.below(ndim + 2);
    placements.push_back(choice < ndim    ? Placement(Shard(choice))
                         : choice == ndim ? Placement(Partial())
                                          : Placement(Replicate()));
  }
  return placements;
}

struct Result {
  Tensors tensors;  // the value, then gradients
  std::string error;
};

Result evaluate(const BroadcastCase& c, Tensors inputs) {
  Result result;
  try {
    if (c.in_place) {
      inputs[0] = inputs[0] * 1;
      result.tensors.push_back(full(c.run(inputs)));
      return result;
    }
    for (T& t : inputs) t = t.detach().requires_grad_();
    const T value = c.run(inputs);
    result.tensors.push_back(full(value.detach()));
    if (!value.requires_grad()) return result;
    const T weight = seeded(3, [&] { return at::randn(result.tensors[0].sizes(), at::kDouble); });
    const T weighted =
        is_dtensor(value)
            ? T(place(weight, DTensor(value).device_mesh(), Placements(size_t(DTensor(value).device_mesh().ndim()))))
            : weight;
    (value * weighted).sum().backward();
    for (const T& t : inputs) result.tensors.push_back(t.grad().defined() ? full(t.grad()) : T());
  } catch (const std::exception& error) {
    result.error = error.what();
  }
  return result;
}

void check(const BroadcastCase& c, const std::vector<Sizes>& shapes, const DeviceMesh& mesh, uint64_t seed) {
  const Tensors plain = make_inputs(shapes, 5);
  const Result expected = evaluate(c, plain);
  Dice dice(seed);
  Tensors inputs;
  std::string what = c.name;
  for (const T& t : plain) {
    const Placements placements = some_placements(dice, t.dim(), size_t(mesh.ndim()));
    what += c10::str(" ", t.sizes(), " ", to_string(placements));
    inputs.push_back(place(t, mesh, placements));
  }
  const Result actual = evaluate(c, inputs);
  if (!expected.error.empty()) {
    EXPECT_NE(actual.error, "") << what << " must raise as: " << expected.error;
    return;
  }
  ASSERT_EQ(actual.error, "") << what << " on " << mesh.to_string();
  ASSERT_EQ(actual.tensors.size(), expected.tensors.size()) << what;
  for (size_t i = 0; i < expected.tensors.size(); ++i) {
    if (!expected.tensors[i].defined()) continue;
    ASSERT_EQ(actual.tensors[i].sizes(), expected.tensors[i].sizes()) << what << ", result " << i;
    EXPECT_TRUE(at::allclose(actual.tensors[i], expected.tensors[i], 1e-9, 1e-9, /*equal_nan=*/true))
        << what << " on " << mesh.to_string() << ", result " << i << ":\n"
        << actual.tensors[i] << "\nexpected:\n"
        << expected.tensors[i];
  }
}

void check_all(const std::vector<BroadcastCase>& cases) {
  for (const Sizes& shape : {Sizes{3}, Sizes{4}, Sizes{2, 2}}) {
    on_mesh(shape, [&](const DeviceMesh& mesh) {
      for (const BroadcastCase& c : cases) {
        for (const std::vector<Sizes>& shapes : c.shapes) {
          for (uint64_t seed = 1; seed <= 4; ++seed) check(c, shapes, mesh, seed);
        }
      }
    });
  }
}

// Four indices on three ranks: the last has none, but the value that all indices share is there in full.
TEST(Broadcasting, ARankWithoutIndicesAddsNothing) {
  on_mesh({3}, [](const DeviceMesh& mesh) {
    const T base = at::zeros({5, 2}, at::kDouble);
    const T index = at::tensor({1, 1, 3, 4}, at::kLong);
    const T value = at::tensor({10.0, 20.0}, at::kDouble);
    const T actual = at::index_put(place(base, mesh, {Partial()}), list_of({place(index, mesh, {Shard(0)})}),
                                   place(value, mesh, {Replicate()}), /*accumulate=*/true);
    EXPECT_TRUE(DTensor(actual).placements()[0].is_partial()) << "else the indices were gathered and nothing is tested";
    expect_equal(full(actual), at::index_put(base, list_of({index}), value, true));
  });
}

// Rank 3 has nothing of the three rows and would go on alone.
TEST(Broadcasting, AWriteThatDoesNotFitRaisesOnEveryRank) {
  on_mesh({4}, [](const DeviceMesh& mesh) {
    const T x = place(at::ones({3, 1}, at::kDouble), mesh, {Shard(0)});
    const T other = place(at::ones({2, 3, 1}, at::kDouble), mesh, {Shard(1)});
    EXPECT_EQ(
        error_text<c10::ValueError>([&] { T(x).add_(other); }),
        c10::str("[aten::add_.Tensor] \"self\" has sizes [3,1], but the arguments broadcast to [2,3,1]\n  fix: use "
                 "the form that returns a new tensor, or expand the tensor first\n  at:  rank ",
                 mesh.get_rank(), "/4"));
    EXPECT_THROW(T(x).mul_(place(at::ones({3, 2}, at::kDouble), mesh, {Shard(0)})), c10::ValueError);
  });
}

TEST(Broadcasting, PointwiseOpsAndLosses) {
  check_all(pointwise_cases());
}

TEST(Broadcasting, ProductsAndSolvers) {
  check_all(product_cases());
}

TEST(Broadcasting, NormsAndIndexing) {
  check_all(norm_and_index_cases());
}

}  // namespace
}  // namespace serried::testing
