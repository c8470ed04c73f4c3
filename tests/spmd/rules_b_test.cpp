// Rules that are written call by call: their texts, and brute force where the conformance vectors have no case.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <set>

#include "serried/spmd/registry.h"
#include "tests/support/rule_calls.h"
#include "tests/support/rule_verifier.h"
#include "tests/support/sample_call.h"

namespace serried::testing {
namespace {

using torch::jit::Stack;

at::Tensor indices(const std::vector<int64_t>& values) {
  return at::tensor(values, at::kLong);
}

TEST(Tables, NoOpStandsInTwoOfThem) {
  std::set<std::string_view> names;
  for (const spmd::RuleTable& table : spmd::rule_tables()) {
    for (const spmd::RuleEntry& entry : table.entries) {
      EXPECT_TRUE(names.insert(entry.name).second) << entry.name << " again in " << table.family;
    }
  }
  EXPECT_TRUE(names.contains("mm"));
}

TEST(ViewRules, PermuteAndTransposeMoveLetters) {
  EXPECT_EQ(rule_of("permute", {numbers({2, 3, 4}), Sizes{2, 0, 1}}), "abc => cab");
  EXPECT_EQ(rule_of("permute", {numbers({2, 3, 4}), Sizes{-1, 0, 1}}), "abc => cab");
  EXPECT_EQ(rule_of("transpose.int", {numbers({2, 3, 4}), 0, -1}), "abc => cba");
  EXPECT_EQ(rule_of("t", {numbers({2, 3})}), "ab => ba");
  EXPECT_EQ(rule_of("t", {numbers({2})}), "... => ...");
}

TEST(ViewRules, SqueezeGoesByTheGlobalSizes) {
  EXPECT_EQ(rule_of("squeeze", {numbers({1, 4, 1})}), "1a1 => a; squeeze");
  EXPECT_EQ(rule_of("squeeze.dim", {numbers({1, 4, 1}), -1}), "1a1 => 1a; squeeze");
  EXPECT_EQ(rule_of("squeeze.dim", {numbers({1, 4, 1}), 1}), "1a1 => 1a1; squeeze");
  EXPECT_EQ(rule_of("unsqueeze", {numbers({3, 4}), -1}), "ab => ab1");
}

TEST(ShapeRules, EqualPiecesOfADimAreCutAlike) {
  const at::Tensor x = numbers({2, 12});
  EXPECT_EQ(rule_of("split.Tensor", {x, 4, 1}), "a(c=3 b=4) => [ab]; pieces");
  EXPECT_EQ(rule_of("split_with_sizes", {x, Sizes{6, 6}, -1}), "a(c=2 b=6) => [ab]; pieces");
  EXPECT_EQ(rule_of("slice.Tensor", {x, 1, 4, 8, 1}), "a(c=3 b=4) => ab; pieces");
  EXPECT_EQ(rule_of("slice.Tensor", {x, 1, -4, c10::IValue(), 1}), "a(c=3 b=4) => ab; pieces");
  EXPECT_EQ(rule_of("slice_backward", {numbers({2, 4}), Sizes{2, 12}, 1, 8, 12, 1}), "ab -> a(c=3 b=4); size; pieces");
  EXPECT_EQ(rule_of("cat", {c10::List<at::Tensor>{x, x, x}, 1}), "[ab] => a(c=3 b=12)");
  expect_right("split.Tensor", {x, 4, 1});
  expect_right("unsafe_split_with_sizes", {x, Sizes{6, 6}, -1});
  expect_right("slice.Tensor", {x, 1, 4, 8, 1});
  expect_right("slice.Tensor", {x, 1, -4, c10::IValue(), 1});
  expect_right("slice_backward", {numbers({2, 4}), Sizes{2, 12}, 1, 8, 12, 1});
  expect_right("cat", {c10::List<at::Tensor>{x, x, x}, 1});
}

TEST(ShapeRules, UnequalPiecesOfADimAreWhole) {
  const at::Tensor x = numbers({2, 12});
  EXPECT_EQ(rule_of("split.Tensor", {x, 5, 1}), "K@dim ... => [J@dim ...]");
  EXPECT_EQ(rule_of("split.Tensor", {x, 12, 1}), "K@dim ... => [J@dim ...]");
  EXPECT_EQ(rule_of("split_with_sizes", {x, Sizes{4, 8}, 1}), "K@dim ... => [J@dim ...]");
  EXPECT_EQ(rule_of("slice.Tensor", {x, 1, 2, 6, 1}), "K@dim ... => J@dim ...") << "across two pieces";
  EXPECT_EQ(rule_of("slice.Tensor", {x, 1, 0, 6, 2}), "K@dim ... => J@dim ...");
  EXPECT_EQ(rule_of("cat", {c10::List<at::Tensor>{x, numbers({2, 3})}, 1}), "[K@dim ...] => J@dim ...");
}

TEST(ViewRules, ExpandedDimsAreWhole) {
  EXPECT_EQ(rule_of("expand", {numbers({3, 1}), Sizes{2, 3, 5}}), "b1 => AbC; size");
  EXPECT_EQ(rule_of("expand", {numbers({3, 1}), Sizes{-1, -1}}), "a1 => a1; size");
  expect_right("expand", {numbers({6, 1}), Sizes{2, 6, 5}, false});
}

TEST(ViewRules, ReinterpretedBytesKeepTheLastDimWhole) {
  EXPECT_EQ(rule_of("view.dtype", {numbers({2, 4}), int64_t(at::kLong)}), "!... -> ...");
  EXPECT_EQ(rule_of("view.dtype", {numbers({2, 4}), int64_t(at::kFloat)}), "!...K -> ...J");
  expect_right("view.dtype", {numbers({6, 4}), int64_t(at::kFloat)});
}

TEST(ViewRules, ComplexAndRealViews) {
  expect_right("view_as_real", {at::randn({6, 4}, at::kComplexDouble)});
  expect_right("view_as_complex", {numbers({6, 4, 2})});
}

TEST(ShapeRules, AWholeSliceKeepsTheCut) {
  EXPECT_EQ(rule_of("slice.Tensor", {numbers({4, 3}), 0, 0, int64_t(1) << 60, 1}), "... => ...");
  EXPECT_EQ(rule_of("slice.Tensor", {numbers({4, 3}), 0, -4, 4, 1}), "... => ...");
  EXPECT_EQ(rule_of("slice.Tensor", {numbers({4, 3}), 0, 0, 3, 1}), "K@dim ... => J@dim ...");
  EXPECT_EQ(rule_of("slice.Tensor", {numbers({4, 3}), 0, 0, 4, 2}), "K@dim ... => J@dim ...");
  expect_right("slice.Tensor", {numbers({7, 6}), 0, -7, int64_t(1) << 60, 1});
  expect_right("slice_backward", {numbers({7, 6}), Sizes{7, 6}, 0, 0, int64_t(1) << 60, 1});
  expect_right("slice_scatter", {numbers({7, 6}), numbers({3, 6}), 0, 1, 4, 1});
}

TEST(ShapeRules, PaddingWithZerosIsLinear) {
  EXPECT_EQ(rule_of("constant_pad_nd", {numbers({4, 3}), Sizes{1, 1}, 0.0}), "aB -> aC");
  EXPECT_EQ(rule_of("constant_pad_nd", {numbers({4, 3}), Sizes{1, 1}, 2.0}), "!aB -> aC");
  expect_right("constant_pad_nd", {numbers({6, 7}), Sizes{1, 2}, 0.0});
  expect_right("constant_pad_nd", {numbers({6, 7}), Sizes{0, 0, 1, -1}, 2.0});
}

TEST(ShapeRules, TriangularPartsAreCutInBothDims) {
  for (const int64_t diagonal : {-2, 0, 1, 5}) {
    expect_right("tril", {numbers({2, 7, 6}), diagonal});
    expect_right("triu", {numbers({6, 7}), diagonal});
  }
}

TEST(ShapeRules, RollsAndFlipsKeepOtherDims) {
  EXPECT_EQ(rule_of("flip", {numbers({4, 3}), Sizes{-1}}), "aB => aB");
  EXPECT_EQ(rule_of("roll", {numbers({4, 3}), Sizes{1}, Sizes{}}), "AB => AB");
  EXPECT_EQ(rule_of("roll", {numbers({4, 3}), Sizes{1}, Sizes{0}}), "Ab => Ab");
  EXPECT_EQ(rule_of("rot90", {numbers({4, 3, 2}), 1, Sizes{0, 1}}), "ABc => BAc");
}

TEST(ReductionRules, MeansOfUnevenPartsAreWeighed) {
  expect_right("mean.dim", {numbers({7, 5, 4}), Sizes{0, 2}, false, c10::IValue()});
  expect_right("mean.dim", {numbers({7, 5, 4}), Sizes{1}, true, c10::IValue()});
  expect_right("mean", {numbers({7, 5}), c10::IValue()});
  expect_right("mean.dim", {numbers({}), Sizes{-1}, false, c10::IValue()});
}

TEST(ReductionRules, NormsGoByTheirOrder) {
  const auto norm = [](double order) {
    return rule_of("linalg_vector_norm", {numbers({4, 3}), order, Sizes{0}, false, c10::IValue()});
  };
  EXPECT_EQ(norm(1), "!k@dim ... -> ...");
  EXPECT_EQ(norm(0), "!k@dim ... -> ...");
  EXPECT_EQ(norm(2), "!K@dim ... -> ...");
  EXPECT_EQ(norm(std::numeric_limits<double>::infinity()), "!k@dim ... ->max ...");
  EXPECT_EQ(norm(-std::numeric_limits<double>::infinity()), "!k@dim ... ->min ...");
}

TEST(IndexRules, EmbeddingIsLookedUpInParts) {
  expect_right("embedding", {numbers({7, 6}), indices({0, 6, 3, 3, 1}), -1, false, false});
  expect_right("embedding_dense_backward", {numbers({5, 6}), indices({0, 6, 3, 3, 1}), 7, -1, false});
  EXPECT_EQ(rule_of("embedding_dense_backward", {numbers({5, 6}), indices({0, 6, 3, 3, 1}), 7, -1, true}),
            "Ab, !A -> Vb");
  expect_right("embedding_dense_backward", {numbers({5, 6}), indices({0, 6, 3, 3, 1}), 7, -1, true});
}

TEST(IndexRules, IndexPutsItsDimsWhereTheIndicesWere) {
  const auto index = [](std::vector<std::optional<at::Tensor>> given) {
    c10::List<std::optional<at::Tensor>> list;
    for (const auto& tensor : given) list.push_back(tensor);
    return rule_of("index.Tensor", {numbers({4, 3, 5, 2}), list});
  };
  const at::Tensor one = indices({0, 1});
  EXPECT_EQ(index({one}), "abcd, [!...] => ...bcd; pick a");
  EXPECT_EQ(index({std::nullopt, one}), "abcd, [!...] => a...cd; pick b");
  EXPECT_EQ(index({std::nullopt, one, one}), "aBCd, [!...] => a...d");
  EXPECT_EQ(index({one, std::nullopt, one}), "AbCd, [!...] => ...bd");
  EXPECT_EQ(index({at::ones({4, 3}, at::kBool)}), "ABcd, [!EF] => Gcd");
}

TEST(IndexRules, IndexLooksUpInParts) {
  c10::List<std::optional<at::Tensor>> list;
  list.push_back(std::optional<at::Tensor>());
  list.push_back(std::optional<at::Tensor>(indices({0, -1, 6, 2}).view({2, 2})));
  expect_right("index.Tensor", {numbers({6, 7, 4}), list});
}

TEST(IndexRules, GatherLooksUpInParts) {
  expect_right("gather", {numbers({7, 6}), 0, at::randint(7, {5, 6}, at::kLong), false});
  expect_right("gather", {numbers({7, 6}), 1, at::randint(6, {5, 4}, at::kLong), false});
  EXPECT_EQ(rule_of("gather", {at::ones({4, 3}, at::kBool), 0, at::zeros({2, 3}, at::kLong), false}), "Ac, !dc => dc");
}

TEST(IndexRules, ScatteredSumsAddUp) {
  EXPECT_EQ(rule_of("scatter_add", {numbers({7, 6}), 0, at::zeros({5, 6}, at::kLong), numbers({5, 6})}),
            "Ac + !dc, dc -> Ac");
  expect_right("scatter_add", {numbers({7, 6}), 0, at::randint(7, {5, 6}, at::kLong), numbers({5, 6})});
  expect_right("scatter_add", {numbers({7, 6}), 0, at::randint(7, {5, 4}, at::kLong), numbers({6, 6})});
}

TEST(LikeRules, CastsToWholeNumbersAreNotLinear) {
  const auto cast = [](at::ScalarType from, at::ScalarType to) {
    return rule_of("_to_copy", {at::ones({2}, from), int64_t(to), c10::IValue(), c10::IValue(), c10::IValue(), false,
                                c10::IValue()});
  };
  EXPECT_EQ(cast(at::kFloat, at::kDouble), "... => ...");
  EXPECT_EQ(cast(at::kInt, at::kFloat), "... => ...");
  EXPECT_EQ(cast(at::kFloat, at::kInt), "!... -> ...");
  EXPECT_EQ(cast(at::kInt, at::kBool), "!... -> ...");
}

TEST(LikeRules, NewTensorsLookAtShapesOnly) {
  const c10::IValue none;
  EXPECT_EQ(rule_of("new_zeros", {numbers({2, 3}), Sizes{2, 3}, none, none, none, none}), "!... -> ...; shape; size");
  EXPECT_EQ(rule_of("new_zeros", {numbers({2, 3}), Sizes{4}, none, none, none, none}), "!K@* -> A; shape");
}

TEST(FftRules, TransformedDimsAreWhole) {
  EXPECT_EQ(rule_of("_fft_r2c", {numbers({4, 3, 6}), Sizes{1, 2}, 0, true}), "aBC -> aBD");
  expect_right("_fft_r2c", {numbers({6, 3, 7}), Sizes{2}, 0, true});
}

TEST(SortRules, BoundariesAreCountedInParts) {
  const at::Tensor boundaries = at::arange(7, at::kDouble);
  expect_right("bucketize.Tensor", {numbers({6, 5}) * 4, boundaries, false, false});
  expect_right("searchsorted.Tensor", {boundaries, numbers({6, 5}) * 4, false, true, c10::IValue(), c10::IValue()});
  expect_right("histc", {numbers({7, 5}), 6, -1.0, 1.0});
}

}  // namespace
}  // namespace serried::testing
