// Rules of reshapes: texts, and every row of every small pair of shapes by brute force.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "serried/spmd/registry.h"
#include "serried/spmd/rules/reshape.h"
#include "tests/support/rule_verifier.h"
#include "tests/support/sample_call.h"

namespace serried::testing {
namespace {

using spmd::detail::reshape_rule;
using spmd::detail::resolve_sizes;

// All shapes of at most `most` dims with `numel` elements.
std::vector<Sizes> shapes(int64_t numel, int most) {
  std::vector<Sizes> result;
  if (numel == 1) result.push_back({});
  if (most == 0) return result;
  for (int64_t first = 1; first <= numel; ++first) {
    if (numel % first != 0) continue;
    if (numel == first) result.push_back({first});
    for (const Sizes& rest : shapes(numel / first, most - 1)) {
      if (rest.empty()) continue;
      Sizes shape{first};
      shape.insert(shape.end(), rest.begin(), rest.end());
      result.push_back(shape);
    }
  }
  return result;
}

Verdict verify_view(const Sizes& from, const Sizes& to) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::view", "");
  const at::Tensor x = at::arange(c10::multiply_integers(from), at::kDouble).view(from);
  const spmd::Rule rule = spmd::parse_or_raise("test", "aten::view", reshape_rule(from, to));
  return verify_rule(op, {x, to}, rule);
}

TEST(ReshapeRule, KeepsMergesAndSplits) {
  EXPECT_EQ(reshape_rule({6, 12, 6}, {72, 6}), "abc => (ab)c; size");
  EXPECT_EQ(reshape_rule({72, 6}, {6, 12, 6}), "(a=6 b=12)c => abc; size");
  EXPECT_EQ(reshape_rule({2, 3, 4}, {6, 4}), "abc => (ab)c; size");
  EXPECT_EQ(reshape_rule({5}, {5}), "a => a; size");
}

TEST(ReshapeRule, FactorsNestAcrossRuns) {
  EXPECT_EQ(reshape_rule({8, 3, 5}, {4, 30}), "(a=4 b=2)cd => a(bcd); size");
}

TEST(ReshapeRule, SizesThatDoNotNestAreWhole) {
  EXPECT_EQ(reshape_rule({4, 6}, {6, 4}), "AB => CD; size");
  EXPECT_EQ(reshape_rule({5, 4, 6}, {5, 6, 4}), "aBC => aDE; size");
}

TEST(ReshapeRule, DimsOfSizeOneComeAndGo) {
  EXPECT_EQ(reshape_rule({1, 4, 1}, {4}), "1a1 => a; size");
  EXPECT_EQ(reshape_rule({}, {1, 1}), " => 11; size");
  EXPECT_EQ(reshape_rule({4, 1, 3}, {12}), "a1b => (ab); size");
}

TEST(ReshapeRule, WithoutElementsDimsAreMatchedFromBothEnds) {
  EXPECT_EQ(reshape_rule({3, 0, 4}, {3, 0, 7, 4}), "aBd => aBCd; size");
  EXPECT_EQ(reshape_rule({0}, {0, 5}), "A => AB; size");
  EXPECT_EQ(reshape_rule({2, 0}, {0}), "AB => B; size");
}

TEST(ReshapeRule, TooManyDimsHaveNoRule) {
  EXPECT_EQ(reshape_rule({2, 1, 1, 1, 1, 1, 1, 1, 1}, {2}), "");
}

TEST(ResolveSizes, FillsInTheUnknownDim) {
  EXPECT_EQ(resolve_sizes(12, {3, -1}), (Sizes{3, 4}));
  EXPECT_EQ(resolve_sizes(0, {3, -1}), (Sizes{3, 0}));
  EXPECT_EQ(resolve_sizes(12, {3, 4}), (Sizes{3, 4}));
}

TEST(ResolveSizes, GivesNothingWhereSizesDoNotFit) {
  EXPECT_EQ(resolve_sizes(12, {5, -1}), std::nullopt);
  EXPECT_EQ(resolve_sizes(12, {-1, -1}), std::nullopt);
  EXPECT_EQ(resolve_sizes(0, {0, -1}), std::nullopt);
  EXPECT_EQ(resolve_sizes(12, {3, 3}), std::nullopt);
}

class AllReshapes : public ::testing::TestWithParam<int64_t> {};

TEST_P(AllReshapes, EveryRowIsTheViewOfTheWhole) {
  Verdict total;
  const std::vector<Sizes> all = shapes(GetParam(), 3);
  for (const Sizes& from : all) {
    for (const Sizes& to : all) total.add(verify_view(from, to));
  }
  EXPECT_GT(total.rows, int(all.size()));
  for (const std::string& wrong : total.wrong) ADD_FAILURE() << wrong;
}

INSTANTIATE_TEST_SUITE_P(ReshapeRule, AllReshapes, ::testing::Values(1, 4, 6, 12, 18));

TEST(ReshapeRule, RowsOfTensorsWithoutElementsAreRight) {
  Verdict total;
  for (const Sizes& from : {Sizes{0}, Sizes{3, 0}, Sizes{0, 4}, Sizes{3, 0, 4}}) {
    for (const Sizes& to : {Sizes{0}, Sizes{3, 0}, Sizes{0, 4}, Sizes{3, 0, 4}, Sizes{3, 2, 0, 4}}) {
      total.add(verify_view(from, to));
    }
  }
  for (const std::string& wrong : total.wrong) ADD_FAILURE() << wrong;
}

}  // namespace
}  // namespace serried::testing
