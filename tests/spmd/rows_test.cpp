// Rows of rules, written out, for the ops whose rows are known by mathematics.
#include "serried/spmd/rows.h"

#include <gtest/gtest.h>

#include "tests/support/sample_call.h"

namespace serried::spmd {
namespace {

using serried::testing::SampleCall;
using Strings = std::vector<std::string>;

Strings rows_of(std::string_view text, const std::string& schema, torch::jit::Stack arguments) {
  const SampleCall sample(schema, std::move(arguments));
  const Call call = sample.call();
  Strings result;
  for (const Row& row : rows(bind(parse_or_raise("test", "t::f", text), call))) result.push_back(to_string(row));
  return result;
}

/// Rows of an op of tensors only.
Strings rows_of(std::string_view text, std::initializer_list<at::IntArrayRef> shapes) {
  std::string schema = "t::f(";
  torch::jit::Stack arguments;
  for (const at::IntArrayRef shape : shapes) {
    if (!arguments.empty()) schema += ", ";
    schema += "Tensor x" + std::to_string(arguments.size());
    arguments.emplace_back(torch::zeros(shape));
  }
  return rows_of(text, schema + ") -> Tensor", std::move(arguments));
}

TEST(Rows, MatrixProduct) {
  EXPECT_EQ(rows_of("mk, kn -> mn", {{4, 5}, {5, 6}}),
            (Strings{"R R -> R", "S0 R -> S0", "S1 S0 -> P", "R S1 -> S1", "P R -> P", "R P -> P", "P(avg) R -> P(avg)",
                     "R P(avg) -> P(avg)"}));
}

TEST(Rows, BiasIsPartialWhereTheProductIs) {
  EXPECT_EQ(rows_of("mn + mk, kn -> mn", {{6}, {4, 5}, {5, 6}}),
            (Strings{"R R R -> R", "S0 R S1 -> S1", "R S0 R -> S0", "P S1 S0 -> P", "P P R -> P", "P R P -> P",
                     "P(avg) P(avg) R -> P(avg)", "P(avg) R P(avg) -> P(avg)"}));
}

TEST(Rows, AnAbsentBiasAddsNothing) {
  const std::string schema = "t::f(Tensor x, Tensor w, Tensor? b=None) -> Tensor";
  const Strings rows = rows_of("...k, nk + n? -> ...n", schema, {torch::zeros({3, 4, 5}), torch::zeros({6, 5})});
  EXPECT_EQ(rows, (Strings{"R R -> R", "S0 R -> S0", "S1 R -> S1", "S2 S1 -> P", "R S0 -> S2", "P R -> P", "R P -> P",
                           "P(avg) R -> P(avg)", "R P(avg) -> P(avg)"}));
}

TEST(Rows, ANumberInPlaceOfATermIsNoPartial) {
  const std::string schema = "t::f(Tensor x, Scalar other) -> Tensor";
  EXPECT_EQ(rows_of("... + ... -> ...", schema, {torch::zeros({4}), 1.0}), (Strings{"R -> R", "S0 -> S0"}));
  EXPECT_EQ(rows_of("..., ... -> ...", schema, {torch::zeros({4}), 2.0}),
            (Strings{"R -> R", "S0 -> S0", "P -> P", "P(avg) -> P(avg)"}));
}

TEST(Rows, BroadcastInputsStayReplicated) {
  EXPECT_EQ(rows_of("..., !... -> ...", {{4, 5}, {4, 1}}),
            (Strings{"R R -> R", "S0 S0 -> S0", "S1 R -> S1", "P R -> P", "P(avg) R -> P(avg)"}));
  EXPECT_EQ(rows_of("!... -> ...", {{4, 1, 0}}), (Strings{"R -> R", "S0 -> S0", "S1 -> S1"}));
  EXPECT_EQ(rows_of("!..., !... -> ...", {{3, 4, 5}, {4, 5}}),
            (Strings{"R R -> R", "S0 R -> S0", "S1 S0 -> S1", "S2 S1 -> S2"}));
}

TEST(Rows, ReductionsLeaveTheirKind) {
  const std::string schema = "t::f(Tensor x, int[]? dim=None, bool keepdim=False) -> Tensor";
  const at::Tensor x = torch::zeros({3, 4, 5});
  EXPECT_EQ(rows_of("k@dim ... -> ...", schema, {x, std::vector<int64_t>{-1, 0}}),
            (Strings{"R -> R", "S0 -> P", "S2 -> P", "S1 -> S0", "P -> P", "P(avg) -> P(avg)"}));
  EXPECT_EQ(rows_of("k@dim ... -> ...", schema, {x, std::vector<int64_t>{-1, 0}, true}),
            (Strings{"R -> R", "S0 -> P", "S2 -> P", "S1 -> S1", "P -> P", "P(avg) -> P(avg)"}));
  EXPECT_EQ(rows_of("k@dim ... ->max ...", schema, {x}),
            (Strings{"R -> R", "S0 -> P(max)", "S1 -> P(max)", "S2 -> P(max)", "P(max) -> P(max)"}));
  EXPECT_EQ(rows_of("!... -> ", {{3, 4}}), (Strings{"R -> R", "S0 -> P", "S1 -> P"}));
  EXPECT_EQ(rows_of("k@* ->avg; even", {{3}}), (Strings{"R -> R", "S0 -> P(avg)", "P -> P", "P(avg) -> P(avg)"}));
}

TEST(Rows, MovesPassEveryKind) {
  EXPECT_EQ(rows_of("ab => ba", {{3, 4}}),
            (Strings{"R -> R", "S0 -> S1", "S1 -> S0", "P -> P", "P(avg) -> P(avg)", "P(max) -> P(max)",
                     "P(min) -> P(min)", "P(product) -> P(product)"}));
}

TEST(Rows, AMoveThatDropsAFactorCannotCutIt) {
  const Strings rows = rows_of("ab => b", {{3, 4}});
  EXPECT_EQ(rows[1], "S1 -> S0");
  EXPECT_EQ(rows.size(), 7u);
}

TEST(Rows, PickedFactorsLeaveASum) {
  const Strings rows = rows_of("vd, !... => ...d; pick v", {{8, 4}, {2, 3}});
  EXPECT_EQ(rows[1], "S0 R -> P");
  EXPECT_EQ(rows[2], "S1 R -> S2");
  EXPECT_EQ(rows[3], "R S0 -> S0");
  EXPECT_EQ(rows[4], "R S1 -> S1");
  EXPECT_EQ(rows[7], "P(max) R -> P(max)");
}

TEST(Rows, ListsArePartialTogether) {
  const std::string schema = "t::f(Tensor[] xs, int dim=0) -> Tensor";
  const c10::List<at::Tensor> list({torch::zeros({3, 4}), torch::zeros({3, 5})});
  const Strings rows = rows_of("[K@dim ...] => J@dim ...", schema, {list, 1});
  EXPECT_EQ(rows[1], "S0 S0 -> S0");
  EXPECT_EQ(rows[2], "P P -> P");
  EXPECT_EQ(rows.size(), 7u);
}

TEST(Rows, MergedDimsAreCutInFrontOrStrided) {
  const Strings merge = rows_of("abc => (ab)c; size", {{6, 12, 5}});
  EXPECT_EQ(merge[1], "S0 -> S0");
  EXPECT_EQ(merge[2], "S1 -> S0/6");
  EXPECT_EQ(merge[3], "S2 -> S1");
  const Strings split = rows_of("(a=6 b=12)c => abc; size", {{72, 5}});
  EXPECT_EQ(split[1], "S0 -> S0");
  EXPECT_EQ(split[2], "S0/6 -> S1");
  const Strings three = rows_of("(a=2 b c=3) => abc; size", {{24}});
  EXPECT_EQ(three[1], "S0 -> S0");
  EXPECT_EQ(three[2], "S0/2 -> S1");
  EXPECT_EQ(three[3], "S0/8 -> S2");
}

TEST(Rows, MergedWithOneNothingIsInFront) {
  const Strings rows = rows_of("(a=1 b=12) => ab; size", {{12}});
  EXPECT_EQ(rows[1], "S0 -> S1");
}

TEST(Rows, AnOutputThatIsNotLinearStopsPartial) {
  EXPECT_EQ(rows_of("... -> ..., !...", {{4}}), (Strings{"R -> R R", "S0 -> S0 S0"}));
}

TEST(Rows, WeightGradientsArePartial) {
  const Strings rows = rows_of("...N, !...N, !...1 -> ...N, N", {{3, 4, 5}, {3, 4, 5}, {3, 4, 1}});
  EXPECT_EQ(rows[1], "S0 S0 S0 -> S0 P");
  EXPECT_EQ(rows[2], "S1 S1 S1 -> S1 P");
  EXPECT_EQ(rows[3], "P R R -> P P");
}

TEST(Rows, ATermWithoutTheFactorStopsTheRowWhereAnOutputKeepsIt) {
  EXPECT_EQ(rows_of("a + ab -> a, ab", {{3}, {3, 4}})[1], "S0 S0 -> S0 S0");
  EXPECT_EQ(rows_of("a + ab -> a, ab", {{3}, {3, 4}})[2], "P P -> P P");
}

}  // namespace
}  // namespace serried::spmd
