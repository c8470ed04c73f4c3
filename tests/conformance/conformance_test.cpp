// The scorer itself: combinations, local values and comparison follow their definition.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <fstream>
#include <limits>

#include "tests/conformance/combinations.h"
#include "tests/conformance/compare.h"
#include "tests/conformance/local_values.h"
#include "tests/conformance/report.h"

namespace serried::testing {
namespace {

std::vector<std::string> texts(const VectorCase& vector_case, int64_t mesh_ndim) {
  std::vector<std::string> all;
  for (const Combination& combination : combinations(vector_case, mesh_ndim)) all.push_back(to_string(combination));
  return all;
}

VectorCase case_of(torch::jit::Stack arguments) {
  return {.id = "6ac8f8f4658e", .arguments = std::move(arguments), .outputs = {}, .mutated = {}};
}

TEST(Combinations, HashIsFnv1a) {
  EXPECT_EQ(fnv1a("a"), 0xaf63dc4c8601ec8cull);
  EXPECT_EQ(fnv1a("6ac8f8f4658e|R,S0"), 3881499186679987986ull);
}

TEST(Combinations, FewAreAllTakenInOrderLastFastest) {
  const VectorCase two = case_of({at::zeros({3, 1}), 2, at::zeros({2}, at::kLong)});
  EXPECT_EQ(texts(two, 1), (std::vector<std::string>{"R,R", "R,S0", "S0,R", "S0,S0", "P,R", "P,S0"}));
}

TEST(Combinations, WrittenTensorsAreNeverPartialAndNumbersHaveNoPlacement) {
  VectorCase written = case_of({at::zeros({2}), at::Scalar(1.5), c10::IValue()});
  written.mutated.emplace_back(0, at::zeros({2}));
  EXPECT_EQ(texts(written, 1), (std::vector<std::string>{"R", "S0"}));
}

TEST(Combinations, ManyAreTheElevenLowestHashesAfterAllReplicate) {
  const VectorCase many = case_of({at::zeros({2, 3, 4}), at::zeros({2, 3})});
  const std::vector<std::string> chosen = texts(many, 1);
  std::vector<std::pair<uint64_t, std::string>> hashed;
  for (const char* a : {"R", "S0", "S1", "S2", "P"}) {
    for (const char* b : {"R", "S0", "S1", "P"}) {
      const std::string text = std::string(a) + "," + b;
      if (text != "R,R") hashed.emplace_back(fnv1a("6ac8f8f4658e|" + text), text);
    }
  }
  std::sort(hashed.begin(), hashed.end());
  std::vector<std::string> expected{"R,R"};
  for (size_t i = 0; i < 11; ++i) expected.push_back(hashed[i].second);
  EXPECT_EQ(chosen, expected);
}

TEST(Combinations, TwoAxesPairTheOptionsAndHugeProductsAreDrawn) {
  EXPECT_EQ(texts(case_of({at::zeros({2}, at::kLong)}), 2), (std::vector<std::string>{"R:R", "R:S0", "S0:R", "S0:S0"}));
  c10::List<at::Tensor> list;
  for (int i = 0; i < 20; ++i) list.push_back(at::zeros({2, 2, 2}));
  EXPECT_EQ(texts(case_of({list}), 2).size(), kMaxCombinations);
}

TEST(LocalValues, PartialSharesSumUpExactlyAndDifferByRank) {
  const double big = std::numeric_limits<double>::max();
  const at::Tensor x = at::tensor({1.0, -2.5, 0.0, -0.0, big, INFINITY, 3.0}, at::kDouble);
  for (int64_t ranks : {1, 2, 3, 4}) {
    at::Tensor sum = at::zeros_like(x);
    for (int64_t rank = 0; rank < ranks; ++rank) sum += local_value(x, {Partial("sum")}, {{rank}, {ranks}});
    EXPECT_TRUE(sum.equal(x)) << ranks;
  }
  EXPECT_TRUE(local_value(x, {Partial("sum")}, {{1}, {4}})
                  .equal(at::tensor({-1.0, -5.0, 0.0, 0.0, 0.0, INFINITY, 0.0}, at::kDouble)));
}

TEST(LocalValues, ShardsAreCeilPartsAndAxesCutLeftToRight) {
  const at::Tensor x = at::arange(5);
  EXPECT_EQ(local_value(x, {Shard(0)}, {{2}, {4}}).numel(), 1);
  EXPECT_EQ(local_value(x, {Shard(0)}, {{3}, {4}}).numel(), 0);
  EXPECT_TRUE(local_value(x, {Shard(0), Shard(0)}, {{0, 1}, {2, 2}}).equal(at::arange(2, 3)));
}

TEST(LocalValues, CopiesKeepStridesEvenOfExpandedTensors) {
  const at::Tensor x = at::arange(3).expand({2, 3});
  const at::Tensor copy = local_value(x, {Replicate()}, {{0}, {4}});
  EXPECT_EQ(copy.strides(), x.strides());
  EXPECT_TRUE(copy.equal(x));
  EXPECT_NE(copy.data_ptr(), x.data_ptr());
}

TEST(Compare, FollowsTheTolerances) {
  const at::Tensor want = at::tensor({1000.0, 1.0, NAN, INFINITY}, at::kDouble);
  EXPECT_EQ(difference(at::tensor({1000.1, 1.01, NAN, INFINITY}, at::kDouble), want), "");
  EXPECT_NE(difference(at::tensor({1000.2, 1.0, NAN, INFINITY}, at::kDouble), want), "");
  EXPECT_NE(difference(at::tensor({1000.0, 1.0, NAN, -INFINITY}, at::kDouble), want), "");
  EXPECT_NE(difference(at::tensor({1000.0, 1.0, 0.0, INFINITY}, at::kDouble), want), "");
}

TEST(Compare, ShapeDtypeAndIntegersMustBeEqual) {
  EXPECT_NE(difference(at::zeros({2}), at::zeros({2, 1})), "");
  EXPECT_NE(difference(at::zeros({2}), at::zeros({2}, at::kDouble)), "");
  EXPECT_NE(difference(at::ones({2}, at::kLong), at::zeros({2}, at::kLong)), "");
  EXPECT_EQ(difference(c10::IValue(), at::Tensor()), "");
  EXPECT_NE(difference(c10::IValue(true), false), "");
}

TEST(Report, ASmallerNumberOfRightOnesIsWorse) {
  const CountsByOverload reference{{"a", {.combinations = 4, .right = 2}}, {"b", {.combinations = 4, .right = 4}}};
  const CountsByOverload counts{{"a", {.combinations = 4, .right = 3}}, {"b", {.combinations = 4, .right = 3}}};
  EXPECT_EQ(worse_than(reference, counts), std::vector<std::string>{"b"});
  EXPECT_FALSE(keeps_limits({.combinations = 10, .right = 9, .wrong = 1}));
  EXPECT_FALSE(keeps_limits({.combinations = 10, .right = 10, .defaults = 2}));
  EXPECT_TRUE(keeps_limits({.combinations = 10, .right = 10, .defaults = 1}));
}

TEST(Scorer, PlainTensorsGiveTheRecordedResults) {
  const Score result = score({"aten.add.Tensor", "aten.mm.default", "aten.relu_.default", "aten.split.Tensor"},
                             vectors_folder(), {.mesh_shape = {1}, .max_cases = 2, .plain = true});
  const Counts sum = total(count(result));
  EXPECT_GT(sum.combinations, 0);
  EXPECT_TRUE(sum.fully_right());
}

TEST(Scorer, ARecordThatPlainTensorsDoNotGiveIsReplacedByTheirResult) {
  VectorFile file = load_vectors("aten.relu_.default");
  VectorCase& first = file.cases.front();
  EXPECT_FALSE(expect_plain_result(file.op, first));
  const at::Tensor truth = first.mutated.at(0).second.toTensor();
  first.mutated.at(0).second = truth + 1;
  EXPECT_TRUE(expect_plain_result(file.op, first));
  EXPECT_EQ(difference(first.mutated.at(0).second, truth), "");
}

}  // namespace
}  // namespace serried::testing
