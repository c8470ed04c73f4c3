// The verifier verified: false rules are rejected, and would not be were Partial values made by scaling.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tests/support/rule_verifier.h"

namespace serried::testing {
namespace {

struct Claim {
  const char* name;
  const char* op;
  const char* overload;
  const char* rule;
  torch::jit::Stack (*arguments)();
};

at::Tensor sample(at::IntArrayRef sizes) {
  return torch::randn(sizes, torch::kDouble);
}

torch::jit::Stack one() {
  return {sample({6, 12})};
}
torch::jit::Stack two() {
  return {sample({6, 12}), sample({6, 12})};
}

torch::jit::Stack with_infinities() {
  const at::Tensor x = sample({6, 12});
  return {x.masked_fill(torch::rand({6, 12}).gt(0.8), INFINITY), c10::IValue(), c10::IValue(), c10::IValue()};
}

torch::jit::Stack image() {
  const std::vector<int64_t> ones = {1, 1};
  const std::vector<int64_t> none = {0, 0};
  return {sample({6, 6, 6, 6}), sample({12, 6, 3, 3}), sample({12}), ones, ones, ones, false, none, 1};
}

const std::vector<Claim>& false_claims() {
  static const std::vector<Claim> claims = {
      {"ReluIsLinear", "aten::relu", "", "... -> ...", one},
      {"AbsIsLinear", "aten::abs", "", "... -> ...", one},
      {"MaximumIsASum", "aten::maximum", "", "... + ... -> ...", two},
      {"AddScalarIsLinear", "aten::add", "Scalar", "... -> ...",
       [] {
         return torch::jit::Stack{sample({6, 12}), 1.0, 1.0};
       }},
      {"NanToNumOnlyMoves", "aten::nan_to_num", "", "... => ...", with_infinities},
      {"SoftmaxCanBeCutAlongItsDim", "aten::_softmax", "", "!k@dim ... -> k@dim ...",
       [] {
         return torch::jit::Stack{sample({6, 12}), 1, false};
       }},
      {"ConvolutionCanBeCutAlongItsHeight", "aten::convolution", "", "nchW, ocYX + o? -> nohW", image},
  };
  return claims;
}

Verdict verdict_on(const Claim& claim, Split split = Split::independent) {
  torch::manual_seed(11);
  const c10::OperatorHandle op = c10::Dispatcher::singleton().findSchemaOrThrow(claim.op, claim.overload);
  return verify_rule(op, claim.arguments(), spmd::parse_or_raise("test", claim.op, claim.rule), {.split = split});
}

class FalseClaim : public ::testing::TestWithParam<Claim> {};

TEST_P(FalseClaim, IsRejected) {
  EXPECT_FALSE(verdict_on(GetParam()).wrong.empty());
}

INSTANTIATE_TEST_SUITE_P(Rules, FalseClaim, ::testing::ValuesIn(false_claims()),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(Verifier, SplitsByScalingWouldLetFalseClaimsPass) {
  for (size_t k = 0; k < 3; ++k) {
    EXPECT_TRUE(verdict_on(false_claims()[k], Split::scaled).wrong.empty()) << false_claims()[k].name;
  }
}

TEST(Verifier, ATrueRulePassesAndItsRowsAreCounted) {
  const Claim mm{"", "aten::mm", "", "mk, kn -> mn", [] { return torch::jit::Stack{sample({5, 7}), sample({7, 4})}; }};
  const Verdict verdict = verdict_on(mm);
  EXPECT_TRUE(verdict.wrong.empty());
  EXPECT_EQ(verdict.rows, 8);
}

TEST(Verifier, AWrongRowIsNamedWithOpRuleRowAndShapes) {
  const Verdict verdict = verdict_on(false_claims()[0]);
  ASSERT_FALSE(verdict.wrong.empty());
  EXPECT_EQ(verdict.wrong[0],
            "aten::relu  rule: ... -> ...  row: [P -> P] on [2] ranks, shapes Double[6, 12]: output 0 differs");
}

TEST(Verifier, MergedDimsCutInTheMinorFactorAreStrided) {
  const Claim merge{"", "aten::reshape", "", "abc => (ab)c; size", [] {
                      return torch::jit::Stack{sample({6, 12, 5}), std::vector<int64_t>{72, 5}};
                    }};
  torch::manual_seed(11);
  const c10::OperatorHandle op = c10::Dispatcher::singleton().findSchemaOrThrow(merge.op, merge.overload);
  const spmd::Rule rule = spmd::parse_or_raise("test", merge.op, merge.rule);
  const Verdict verdict = verify_rule(op, merge.arguments(), rule, {.max_pairs = 1000});
  EXPECT_EQ(verdict.wrong, std::vector<std::string>());
  EXPECT_EQ(verdict.rows, 9);
  EXPECT_GT(verdict.pairs, 30);
}

}  // namespace
}  // namespace serried::testing
