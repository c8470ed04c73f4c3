// Rules of products, norms, attention, windows and losses: texts where they depend on the call, rows that matter, and
// brute force where the conformance vectors have no case.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "serried/spmd/registry.h"
#include "serried/spmd/rows.h"
#include "tests/support/rule_calls.h"
#include "tests/support/rule_verifier.h"
#include "tests/support/sample_call.h"

namespace serried::testing {
namespace {

using c10::IValue;
using torch::jit::Stack;
using Strings = std::vector<std::string>;

Strings rows_of(const std::string& op, const Stack& arguments) {
  const SampleCall sample(aten_op(op).schema(), arguments);
  const spmd::Call call = sample.call();
  Strings result;
  for (const spmd::Row& row : spmd::rows(spmd::bind(spmd::find_rule(call).value(), call))) {
    result.push_back(spmd::to_string(row));
  }
  return result;
}

TEST(PointwiseRules, SumsArePartialTogether) {
  EXPECT_EQ(rows_of("add.Tensor", {numbers({4}), numbers({4})}),
            (Strings{"R R -> R", "S0 S0 -> S0", "P P -> P", "P(avg) P(avg) -> P(avg)"}));
  EXPECT_EQ(rows_of("add.Scalar", {numbers({4}), 1.0}), (Strings{"R -> R", "S0 -> S0"}));
  EXPECT_EQ(rows_of("lerp.Scalar", {numbers({4}), numbers({4}), 0.5}),
            (Strings{"R R -> R", "S0 S0 -> S0", "P P -> P", "P(avg) P(avg) -> P(avg)"}));
}

TEST(PointwiseRules, ProductsTakeOnePartialFactor) {
  EXPECT_EQ(rows_of("mul.Tensor", {numbers({4}), numbers({4})}),
            (Strings{"R R -> R", "S0 S0 -> S0", "P R -> P", "R P -> P", "P(avg) R -> P(avg)", "R P(avg) -> P(avg)"}));
  EXPECT_EQ(rows_of("div.Scalar", {numbers({4}), 2.0}), (Strings{"R -> R", "S0 -> S0", "P -> P", "P(avg) -> P(avg)"}));
}

TEST(PointwiseRules, RoundingIsNotLinear) {
  EXPECT_EQ(rule_of("div.Tensor_mode", {numbers({4}), numbers({4}), "floor"}), "!..., !... -> ...");
  const at::Tensor whole = at::ones({4}, at::kLong);
  EXPECT_EQ(rule_of("remainder.Tensor", {whole, whole}), "!..., !... -> ...; ones");
  EXPECT_EQ(rule_of("div.Tensor_mode", {numbers({4}), numbers({4}), IValue()}), "..., !... -> ...");
}

TEST(PointwiseRules, TaggedOpsNeedNoLine) {
  EXPECT_EQ(rule_of("exp", {numbers({4})}), "!... -> ...");
  EXPECT_EQ(rule_of("clamp.Tensor", {numbers({4}), numbers({4}), numbers({4})}), "!..., !..., !... -> ...");
}

TEST(PointwiseRules, ForeachAndInPlaceTakeTheRuleOfTheirBase) {
  const c10::List<at::Tensor> list({numbers({4})});
  EXPECT_EQ(rule_of("_foreach_add.List", {list, list}), "... + ... -> ...");
  EXPECT_EQ(rule_of("addcmul_", {numbers({4}), numbers({4}), numbers({4})}), "... + ..., ... -> ...");
}

TEST(ContractionRules, EveryDimOfAProductMayBeCut) {
  EXPECT_EQ(rows_of("bmm", {numbers({2, 3, 4}), numbers({2, 4, 5})}),
            (Strings{"R R -> R", "S0 S0 -> S0", "S1 R -> S1", "S2 S1 -> P", "R S2 -> S2", "P R -> P", "R P -> P",
                     "P(avg) R -> P(avg)", "R P(avg) -> P(avg)"}));
}

TEST(ContractionRules, MatmulGoesByRanks) {
  EXPECT_EQ(rule_of("matmul", {numbers({3}), numbers({3})}), "k, k ->");
  EXPECT_EQ(rule_of("matmul", {numbers({2, 3}), numbers({3})}), "...mk, k -> ...m");
  EXPECT_EQ(rule_of("matmul", {numbers({3}), numbers({5, 3, 4})}), "k, ...kn -> ...n");
  EXPECT_EQ(rule_of("matmul", {numbers({2, 3}), numbers({5, 3, 4})}), "...mk, ...kn -> ...mn");
}

TEST(ContractionRules, TrilinearDropsExpandedAndSummedDims) {
  const Stack bilinear = {numbers({6, 3}), numbers({5, 3, 4}), numbers({6, 4}), Sizes{1, 3},
                          Sizes{0},        Sizes{1, 2},        Sizes{2, 3},     1};
  EXPECT_EQ(rule_of("_trilinear", bilinear), "ac, bcd, ad -> ab");
  expect_right("_trilinear", bilinear);
}

TEST(ContractionRules, DistanceGradientsAddUp) {
  const at::Tensor x = numbers({5, 3});
  const at::Tensor y = numbers({4, 3});
  expect_right("_cdist_backward", {numbers({5, 4}), x, y, 2.0, at::cdist(x, y)});
}

TEST(LinalgRules, OutputsThatAreNotAskedForHaveNoBatch) {
  EXPECT_EQ(rule_of("_linalg_eigh", {numbers({2, 3, 3}), "L", false}), "!...AB -> ...A, Z");
  EXPECT_EQ(rule_of("linalg_qr", {numbers({2, 3, 3}), "r"}), "!...AB -> Z, ...CD");
  EXPECT_EQ(rule_of("_linalg_svd", {numbers({2, 3, 3}), false, false}), "!...AB -> Z, ...E, Y");
}

TEST(LinalgRules, SolveCutsOnlyTheBatchBothSidesHave) {
  EXPECT_EQ(rule_of("_linalg_solve_ex", {numbers({4, 3, 3}), numbers({4, 3, 2})}),
            "!aXZ, !aXY -> aXY, aXZ, aX, a; eye");
  EXPECT_EQ(rule_of("_linalg_solve_ex", {numbers({4, 3, 3}), numbers({4, 3})}), "!aXZ, !aX -> aX, aXZ, aX, a; eye");
  EXPECT_EQ(rule_of("_linalg_solve_ex", {numbers({3, 3}), numbers({4, 3, 2})}), "!XZ, !KXY -> KXY, XZ, X, ; eye");
}

TEST(LinalgRules, ColumnsToSolveForAreIndependent) {
  const at::Tensor a = numbers({3, 3}).tril() + at::eye(3, at::kDouble) * 4;
  EXPECT_EQ(rows_of("linalg_solve_triangular", {a, numbers({3, 5}), false}),
            (Strings{"R R -> R", "R S1 -> S1", "R P -> P", "R P(avg) -> P(avg)"}));
  expect_right("linalg_solve_triangular", {a, numbers({5, 3}), false, /*left=*/false});
}

TEST(NormRules, LayerNormCutsWhatComesBeforeTheNormalisedDims) {
  const Stack arguments = {numbers({4, 3, 5}), Sizes{3, 5}, numbers({3, 5}), numbers({3, 5}), 1e-5};
  EXPECT_EQ(rule_of("native_layer_norm", arguments), "!...PQ, PQ? + PQ? -> ...PQ, !...11, !...11");
  EXPECT_EQ(rows_of("native_layer_norm", arguments), (Strings{"R R R -> R R R", "S0 R R -> S0 S0 S0"}));
}

TEST(NormRules, LayerNormGradientsOfWeightsArePartial) {
  const at::Tensor x = numbers({4, 5});
  const Stack arguments = {numbers({4, 5}),
                           x,
                           Sizes{5},
                           x.mean(1, true),
                           x.std(1, false, true).reciprocal(),
                           numbers({5}),
                           numbers({5}),
                           std::vector<bool>{true, true, true}};
  EXPECT_EQ(rows_of("native_layer_norm_backward", arguments),
            (Strings{"R R R R R R -> R R R", "S0 S0 S0 S0 R R -> S0 P P", "P R R R R R -> P P P",
                     "P(avg) R R R R R -> P(avg) P(avg) P(avg)"}));
}

TEST(NormRules, BatchNormIsCutAnywhereOutsideTraining) {
  const at::Tensor c = numbers({3}).abs();
  const auto rule = [&](bool training) {
    return rule_of("native_batch_norm", {numbers({4, 3, 5}), c, c, c, c, training, 0.1, 1e-5});
  };
  EXPECT_EQ(rule(false), "!ncp, !c?, !c?, !c?, !c? -> ncp, Y, Z");
  EXPECT_EQ(rule(true), "!NcP, !c?, !c?, !c?, !c? -> NcP, c, c");
}

TEST(NormRules, BatchNormGradientsOutsideTraining) {
  const at::Tensor c = numbers({3}).abs() + 0.5;
  expect_right("native_batch_norm_backward",
               {numbers({4, 3, 5}), numbers({4, 3, 5}), c, c, c, at::empty({0}, at::kDouble),
                at::empty({0}, at::kDouble), false, 1e-5, std::vector<bool>{true, true, true}});
}

TEST(NormRules, WeightNormCutsItsOwnDim) {
  const at::Tensor v = numbers({4, 3, 2});
  EXPECT_EQ(rule_of("_weight_norm_interface", {v, numbers({4, 1, 1}), 0}), "!dQR, d11 -> dQR, !d11");
  expect_right("_weight_norm_interface", {v, numbers({4, 1, 1}), 0});
  expect_right("_weight_norm_interface_backward",
               {numbers({4, 3, 2}), v, numbers({4, 1, 1}), v.norm(2, {1, 2}, true), 0});
}

Stack attention(bool is_causal) {
  return {numbers({2, 4, 6, 8}), numbers({2, 4, 5, 8}), numbers({2, 4, 5, 8}), 0.0, is_causal};
}

TEST(AttentionRules, QueriesMayBeCutUnlessCausal) {
  const std::string op = "_scaled_dot_product_flash_attention_for_cpu";
  EXPECT_EQ(rows_of(op, attention(false)),
            (Strings{"R R R -> R R", "S0 S0 S0 -> S0 S0", "S1 S1 S1 -> S1 S1", "S2 R R -> S2 S2"}));
  EXPECT_EQ(rows_of(op, attention(true)), (Strings{"R R R -> R R", "S0 S0 S0 -> S0 S0", "S1 S1 S1 -> S1 S1"}));
  expect_right(op, attention(false));
  expect_right(op, attention(true));
}

TEST(AttentionRules, MasksFollow) {
  Stack arguments = attention(false);
  arguments.insert(arguments.end(), {numbers({2, 1, 6, 5}), IValue()});
  expect_right("_scaled_dot_product_flash_attention_for_cpu", arguments);
  arguments[5] = numbers({6, 5});
  expect_right("_scaled_dot_product_flash_attention_for_cpu", arguments);
}

TEST(AttentionRules, GroupedQueriesAreCutWithTheHeadsTheyShare) {
  const std::string op = "_scaled_dot_product_flash_attention_for_cpu";
  Stack grouped = {numbers({2, 8, 6, 8}), numbers({2, 4, 6, 8}), numbers({2, 4, 6, 8}), 0.0, true};
  EXPECT_EQ(rule_of(op, grouped), "!b(h=4 g=2)LE, !bhSE, !bhSE, !b1LS? -> b(h=4 g=2)LE, b(h=4 g=2)L");
  EXPECT_EQ(rows_of(op, grouped)[2], "S1 S1 S1 -> S1 S1");
  expect_right(op, grouped);
  const auto [out, logsumexp] = at::_scaled_dot_product_flash_attention_for_cpu(
      grouped[0].toTensor(), grouped[1].toTensor(), grouped[2].toTensor(), 0.0, true);
  expect_right(op + "_backward",
               {numbers({2, 8, 6, 8}), grouped[0], grouped[1], grouped[2], out, logsumexp, 0.0, true});
  for (const Sizes& mask : {Sizes{2, 1, 6, 6}, Sizes{2, 8, 6, 6}}) {
    Stack masked = grouped;
    masked[4] = false;
    masked.insert(masked.end(), {numbers(mask), IValue()});
    expect_right(op, masked);
  }
}

TEST(AttentionRules, GradientsOfKeysAddUpOverQueries) {
  for (const bool is_causal : {false, true}) {
    const Stack a = attention(is_causal);
    const auto [out, logsumexp] = at::_scaled_dot_product_flash_attention_for_cpu(a[0].toTensor(), a[1].toTensor(),
                                                                                  a[2].toTensor(), 0.0, is_causal);
    expect_right("_scaled_dot_product_flash_attention_for_cpu_backward",
                 {numbers({2, 4, 6, 8}), a[0], a[1], a[2], out, logsumexp, 0.0, is_causal});
  }
}

Stack convolution(int64_t groups, bool transposed) {
  const at::Tensor weight = groups == 1 ? numbers(transposed ? Sizes{4, 6, 3} : Sizes{6, 4, 3}) : numbers({6, 2, 3});
  return {numbers({5, 4, 9}), weight, numbers({6}), Sizes{1}, Sizes{1}, Sizes{1}, transposed, Sizes{0}, groups};
}

TEST(ConvRules, BatchAndChannelsMayBeCut) {
  EXPECT_EQ(rule_of("convolution", convolution(1, false)), "ncP, ocP + o? -> noP");
  EXPECT_EQ(rule_of("convolution", convolution(1, true)), "ncP, coP + o? -> noP");
  EXPECT_EQ(rule_of("convolution", convolution(2, false)), "nCP, ODP + O? -> nOP");
  for (const bool transposed : {false, true}) expect_right("convolution", convolution(1, transposed));
  expect_right("convolution", convolution(2, false));
}

TEST(ConvRules, InputChannelsStayWholeWhereTheBiasHasAGradient) {
  for (const bool has_bias : {false, true}) {
    const Stack arguments = {numbers({5, 6, 9}),
                             numbers({5, 4, 9}),
                             numbers({6, 4, 3}),
                             Sizes{6},
                             Sizes{1},
                             Sizes{1},
                             Sizes{1},
                             false,
                             Sizes{0},
                             1,
                             std::vector<bool>{true, true, has_bias}};
    EXPECT_EQ(rule_of("convolution_backward", arguments),
              has_bias ? "noP, !nCP, !oCP -> nCP, oCP, o" : "noP, !ncP, !ocP -> ncP, ocP, o");
    expect_right("convolution_backward", arguments);
  }
}

TEST(PoolingRules, SingleImagesHaveChannelsToCut) {
  EXPECT_EQ(rows_of("avg_pool2d", {numbers({3, 4, 4}), Sizes{2, 2}}),
            (Strings{"R -> R", "S0 -> S0", "P -> P", "P(avg) -> P(avg)"}));
  EXPECT_EQ(rule_of("fractional_max_pool2d", {numbers({3, 6, 6}), Sizes{2, 2}, Sizes{2, 2}, numbers({1, 3, 2})}),
            "!cPQ, !NcS -> cPQ, cPQ");
}

TEST(PoolingRules, PointsOfAGridMayBeCut) {
  const Stack arguments = {numbers({2, 3, 4, 4}), numbers({2, 5, 6, 2}).clamp(-1, 1), 0, 0, false};
  EXPECT_EQ(rows_of("grid_sampler_2d", arguments), (Strings{"R R -> R", "S0 S0 -> S0", "S1 R -> S1", "R S1 -> S2",
                                                            "R S2 -> S3", "P R -> P", "P(avg) R -> P(avg)"}));
}

TEST(LossRules, ReductionsLeaveAPartialScalar) {
  const auto rule = [](int64_t reduction) {
    return rule_of("mse_loss", {numbers({4, 3}), numbers({4, 3}), reduction});
  };
  EXPECT_EQ(rule(0), "!..., !... -> ...");
  EXPECT_EQ(rule(1), "!..., !... ->; mean_share");
  EXPECT_EQ(rule(2), "!..., !... ->");
}

TEST(LossRules, MeansAreWeighedBySelf) {
  EXPECT_EQ(rule_of("mse_loss", {numbers({4, 1}), numbers({2, 4, 3}), 1}), "!AbC, !AbC ->; mean_share");
  expect_right("mse_loss", {numbers({5, 1}), numbers({2, 5, 3}), 1});
  expect_right("mse_loss_backward", {numbers({}), numbers({5, 1}), numbers({2, 5, 3}), 1});
}

TEST(LossRules, NegativeLogLikelihoodAddsUpOverClasses) {
  const at::Tensor target = at::tensor({0, 2, 1, 1}, at::kLong);
  EXPECT_EQ(rule_of("nll_loss_forward", {numbers({4, 3}), target, IValue(), 2, -100}), "!nc, !n, !c? -> , ; target c");
  EXPECT_EQ(rule_of("nll_loss_forward", {numbers({3}), target[0], IValue(), 2, -100}), "!c, !, !c? -> , ; target c");
  EXPECT_EQ(rule_of("nll_loss_backward", {numbers({}), numbers({4, 3}), target, IValue(), 1, -100, numbers({})}),
            ", !nc, !n, !c?, ! -> nc; target c; dense");
  const at::Tensor many = at::tensor({0, 6, 1, 3, 5}, at::kLong), weight = numbers({7}).abs();
  for (const int64_t ignored : {-100, 3}) {
    for (const int64_t reduction : {0, 2}) {
      expect_right("nll_loss_forward", {numbers({5, 7}), many, weight, reduction, ignored});
      expect_right("nll_loss_forward", {numbers({7}), many[1], weight, reduction, ignored});
    }
    expect_right("nll_loss_backward", {numbers({5}), numbers({5, 7}), many, weight, 0, ignored, numbers({})});
    expect_right("nll_loss_backward",
                 {numbers({}), numbers({5, 7}), many, IValue(), 1, ignored, at::full({}, 4, at::kDouble)});
    const at::Tensor images = many.view({5, 1, 1}).expand({5, 2, 3}).contiguous();
    expect_right("nll_loss2d_forward", {numbers({5, 7, 2, 3}), images, weight, 0, ignored});
    expect_right("nll_loss2d_backward", {numbers({}), numbers({5, 7, 2, 3}), images, weight, 2, ignored, numbers({})});
  }
}

TEST(OptimRules, AllListsLieAlike) {
  const at::Tensor step = at::ones({}, at::kDouble);
  const auto rows = rows_of(
      "_fused_adam", {c10::List<at::Tensor>({numbers({4})}), c10::List<at::Tensor>({numbers({4})}),
                      c10::List<at::Tensor>({numbers({4})}), c10::List<at::Tensor>({numbers({4})}),
                      c10::List<at::Tensor>(), c10::List<at::Tensor>({step}), 0.1, 0.9, 0.99, 0.0, 1e-8, false, false});
  EXPECT_EQ(rows, (Strings{"R R R R R -> R R R R R", "S0 S0 S0 S0 R -> S0 S0 S0 S0 S0"}));
}

}  // namespace
}  // namespace serried::testing
