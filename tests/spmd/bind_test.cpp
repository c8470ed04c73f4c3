// Letters, ellipses, lists and compound dims laid over calls, and what does not fit.
#include "serried/spmd/bind.h"

#include <gtest/gtest.h>

#include "tests/support/sample_call.h"
#include "tests/support/errors.h"

namespace serried::spmd {
namespace {

using serried::testing::error_text;
using serried::testing::SampleCall;

Bound bound(std::string_view text, const std::string& schema, torch::jit::Stack arguments) {
  const SampleCall sample(schema, std::move(arguments));
  return bind(parse_or_raise("test", "t::f", text), sample.call());
}

/// "a=4 b=5; ab" : the letters of each dim, "-" for none, dims of one tensor separated by spaces.
std::string shape_of(const Bound& bound, const BoundTensor& tensor) {
  std::string text;
  for (const DimFactors& dim : tensor.dims) {
    if (!text.empty()) text += ' ';
    if (dim.empty()) text += '-';
    for (const int16_t id : dim) {
      text += bound.factors[size_t(id)].letter + std::to_string(bound.factors[size_t(id)].size);
    }
  }
  return text;
}

std::vector<int64_t> output_sizes(const Bound& bound, size_t output = 0) {
  std::vector<int64_t> sizes;
  for (size_t d = 0; d < bound.outputs[output].dims.size(); ++d) sizes.push_back(output_size(bound, output, d));
  return sizes;
}

const std::string kTwo = "t::f(Tensor x, Tensor y) -> Tensor";
const std::string kReduce = "t::f(Tensor x, int[]? dim=None, bool keepdim=False) -> Tensor";
const std::string kList = "t::f(Tensor[] xs, int dim=0) -> Tensor";

TEST(Bind, EllipsesMatchFromTheRight) {
  const Bound b = bound("..., ... -> ...", kTwo, {torch::zeros({3, 4, 5}), torch::zeros({4, 1})});
  EXPECT_EQ(shape_of(b, b.inputs[0]), ".3 .4 .5");
  EXPECT_EQ(shape_of(b, b.inputs[1]), ".4 -");
  EXPECT_EQ(b.inputs[0].dims[1], b.inputs[1].dims[0]);
  EXPECT_EQ(output_sizes(b), (std::vector<int64_t>{3, 4, 5}));
}

TEST(Bind, TheSecondOperandMayBeTheLargerOne) {
  const Bound b = bound("..., ... -> ...", kTwo, {torch::zeros({1}), torch::zeros({3, 4})});
  EXPECT_EQ(shape_of(b, b.inputs[0]), "-");
  EXPECT_EQ(output_sizes(b), (std::vector<int64_t>{3, 4}));
  const Bound empty = bound("..., ... -> ...", kTwo, {torch::zeros({1}), torch::zeros({0})});
  EXPECT_EQ(output_sizes(empty), (std::vector<int64_t>{0}));
}

TEST(Bind, OperandsOfLowerRankLackLeadingLetters) {
  const Bound b = bound("mn, mn -> mn", kTwo, {torch::zeros({4}), torch::zeros({3, 4})});
  EXPECT_EQ(shape_of(b, b.inputs[0]), "n4");
  const Bound scalar = bound("...k, k -> ...", kTwo, {torch::zeros({}), torch::zeros({3})});
  EXPECT_EQ(shape_of(scalar, scalar.inputs[0]), "");
  EXPECT_EQ(output_sizes(scalar), (std::vector<int64_t>{}));
}

TEST(Bind, NamedDimsAreFactorsOfTheirOwn) {
  const at::Tensor x = torch::zeros({3, 4, 5});
  const Bound b = bound("k@dim ... -> ...", kReduce, {x, std::vector<int64_t>{-1, 0}});
  EXPECT_EQ(shape_of(b, b.inputs[0]), "k3 .4 k5");
  EXPECT_EQ(output_sizes(b), (std::vector<int64_t>{4}));
  const Bound kept = bound("k@dim ... -> ...", kReduce, {x, std::vector<int64_t>{-1, 0}, true});
  EXPECT_EQ(output_sizes(kept), (std::vector<int64_t>{1, 4, 1}));
  const Bound all = bound("k@dim ... -> ...", kReduce, {x, c10::IValue(), true});
  EXPECT_EQ(output_sizes(all), (std::vector<int64_t>{1, 1, 1}));
  const Bound whole = bound("K@dim ... -> K@dim ...", kReduce, {x, std::vector<int64_t>{1}, true});
  EXPECT_EQ(output_sizes(whole), (std::vector<int64_t>{3, -1, 5}));
  const Bound star = bound("k@* ->", kReduce, {x, std::vector<int64_t>{1}});
  EXPECT_EQ(output_sizes(star), (std::vector<int64_t>{}));
}

TEST(Bind, ATensorWithoutDimsHasNoNamedDim) {
  const Bound b = bound("K@dim ... -> K@dim ...", kReduce, {torch::zeros({}), std::vector<int64_t>{-1}});
  EXPECT_EQ(output_sizes(b), (std::vector<int64_t>{}));
}

TEST(Bind, OutputsMayInsertADim) {
  const c10::List<at::Tensor> list({torch::zeros({3, 4}), torch::zeros({3, 4})});
  const Bound b = bound("[...] => 1@dim ...", kList, {list, -1});
  EXPECT_EQ(output_sizes(b), (std::vector<int64_t>{3, 4, 1}));
  const Bound j = bound("[...] => J@dim ...", kList, {list, 1});
  EXPECT_EQ(output_sizes(j), (std::vector<int64_t>{3, -1, 4}));
}

TEST(Bind, TensorsOfAListMayDifferWhereTheyAreWhole) {
  const c10::List<at::Tensor> list({torch::zeros({3, 4}), torch::zeros({3, 5}), torch::zeros({0})});
  const Bound b = bound("[K@dim ...] => J@dim ...", kList, {list, 1});
  EXPECT_EQ(shape_of(b, b.inputs[0]), ".3 K4");
  EXPECT_EQ(shape_of(b, b.inputs[1]), ".3 K5");
  EXPECT_EQ(shape_of(b, b.inputs[2]), "-");
  EXPECT_EQ(output_sizes(b), (std::vector<int64_t>{3, -1}));
}

TEST(Bind, EmptyTensorsOfAListAreNothingOnlyBesideOthers) {
  const c10::List<at::Tensor> list({torch::zeros({0}), torch::zeros({0})});
  const Bound b = bound("[...] => N@dim ...", kList, {list, 1});
  EXPECT_EQ(output_sizes(b), (std::vector<int64_t>{0, -1}));
  const Bound cat = bound("[K@dim ...] => J@dim ...", kList, {list, 0});
  EXPECT_EQ(shape_of(cat, cat.inputs[0]), "K0");
  EXPECT_EQ(output_sizes(cat), (std::vector<int64_t>{-1}));
}

TEST(Bind, CompoundSizesAreGivenOrFollow) {
  const std::string one = "t::f(Tensor x) -> Tensor";
  const Bound b = bound("(a=2 b)c => a(bc); size", one, {torch::zeros({6, 4})});
  EXPECT_EQ(shape_of(b, b.inputs[0]), "a2b3 c4");
  EXPECT_EQ(output_sizes(b), (std::vector<int64_t>{2, 12}));
  for (const Factor& factor : b.factors) EXPECT_TRUE(factor.must_divide);
  EXPECT_EQ(b.inputs[0].position(b.inputs[0].dims[0][1]), -2);
  EXPECT_EQ(b.inputs[0].position(b.inputs[0].dims[1][0]), 1);
  EXPECT_EQ(b.inputs[0].position(99), -1);
  const Bound alone = bound("(a=1 b)c => a b c; size", one, {torch::zeros({6, 4})});
  EXPECT_EQ(shape_of(alone, alone.inputs[0]), "b6 c4");
  for (const Factor& factor : alone.factors) EXPECT_FALSE(factor.must_divide);
}

TEST(Bind, AbsentOptionalsTakeTheirSlot) {
  const std::string schema = "t::f(Tensor x, Tensor? w=None, Tensor? b=None) -> Tensor";
  const Bound b = bound("...N, N? + !N? -> ...N", schema, {torch::zeros({3, 4}), c10::IValue(), torch::zeros({4})});
  ASSERT_EQ(b.inputs.size(), 2u);
  EXPECT_EQ(b.inputs[1].term, 1);
  EXPECT_EQ(b.inputs[1].slot, 2);
  EXPECT_FALSE(b.inputs[1].linear);
}

TEST(Bind, AbsentArgumentsLeaveSlotsThatAreNotOptional) {
  const std::string schema = "t::f(Tensor x, Tensor? low=None, Tensor? high=None) -> Tensor";
  const Bound b = bound("!..., !... -> ...", schema, {torch::zeros({3, 4}), c10::IValue(), torch::zeros({4})});
  EXPECT_EQ(b.inputs[1].slot, 1);
  EXPECT_EQ(shape_of(b, b.inputs[1]), ".4");
}

TEST(Bind, OutArgumentsTakeNoSlot) {
  const Bound b =
      bound("... -> ...", "t::f(Tensor x, *, Tensor(a!) out) -> Tensor(a!)", {torch::zeros({3}), torch::zeros({3})});
  EXPECT_EQ(b.inputs.size(), 1u);
}

TEST(Bind, ListOutputsAreMarked) {
  const Bound b = bound("K@dim ... => [J@dim ...]", "t::f(Tensor x, int dim) -> Tensor[]", {torch::zeros({3, 4}), 0});
  EXPECT_TRUE(b.outputs[0].list);
}

TEST(Bind, ErrorsNameOpRuleAndArgument) {
  const at::Tensor x = torch::zeros({3, 4});
  EXPECT_EQ(error_text<c10::ValueError>([&] {
              bound("mk, kn -> mn", kTwo, {x, torch::zeros({5, 2})});
            }),
            "[t::f] argument \"y\" has size 5 at dim 0, but \"k\" there is 4 in the arguments before it\n"
            "  rule: mk, kn -> mn\n"
            "  fix: pass tensors whose sizes agree where the rule has the same letter");
  EXPECT_EQ(error_text<c10::ValueError>([&] {
              bound("mk, kn -> mn", kTwo, {x, torch::zeros({4, 2, 2})});
            }),
            "[t::f] argument \"y\" has 3 dims, but its slot has 2\n"
            "  rule: mk, kn -> mn\n"
            "  fix: pass a tensor of at most that many dims, or write \"...\" in the slot");
  EXPECT_EQ(error_text<c10::ValueError>([&] {
              bound("... -> ...", kTwo, {x, x});
            }),
            "[t::f] argument \"y\" has no slot: the rule has 1 inputs\n"
            "  rule: ... -> ...\n"
            "  fix: write one slot per tensor argument, left of the arrow");
  const c10::List<at::Tensor> list({x, x});
  EXPECT_EQ(error_text<c10::ValueError>([&] { bound("... -> ...", kList, {list}); }),
            "[t::f] argument \"xs\" is a list of 2 tensors, but its slot is not\n"
            "  rule: ... -> ...\n"
            "  fix: write the slot as a list: [...]");
  EXPECT_EQ(error_text<c10::ValueError>([&] {
              bound("(a=2 b=2)c, ... => ...", kTwo, {x, x});
            }),
            "[t::f] argument \"x\" has size 3 at dim 0, which its factors of product 4 do not make\n"
            "  rule: (a=2 b=2)c, ... => ...\n"
            "  fix: give sizes in the rule whose product is the dim's size: (a=6 b=12)");
  EXPECT_EQ(error_text<c10::ValueError>([&] {
              bound("..., ... => 1@place ...", kTwo, {x, x});
            }),
            "[t::f] an output sits at argument \"place\", which the call does not give\n"
            "  rule: ..., ... => 1@place ...\n"
            "  fix: name an int or int[] argument of the op after \"@\"");
}

TEST(Bind, DimsOutOfRangeAreIndexErrors) {
  EXPECT_EQ(error_text<c10::IndexError>([&] {
              bound("k@dim ... -> ...", kReduce, {torch::zeros({3, 4}), std::vector<int64_t>{2}});
            }),
            "[t::f] argument \"dim\" names dim 2, but argument \"x\" has 2 dims\n"
            "  rule: k@dim ... -> ...\n"
            "  fix: pass a dim from -2 to 1");
  const c10::List<at::Tensor> list({torch::zeros({3})});
  EXPECT_EQ(error_text<c10::IndexError>([&] {
              bound("[...] => 1@dim ...", kList, {list, 2});
            }),
            "[t::f] argument \"dim\" does not name dims of an output of 2 dims\n"
            "  rule: [...] => 1@dim ...\n"
            "  fix: pass each dim once, from -2 to 1");
}

}  // namespace
}  // namespace serried::spmd
