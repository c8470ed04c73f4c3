// The notation: what is parsed, at compile time too, and what each malformed text is told.
#include "serried/spmd/rule.h"

#include <gtest/gtest.h>

#include "tests/support/errors.h"

namespace serried::spmd {
namespace {

using Mark = DimPattern::Mark;

constexpr Rule parsed(std::string_view text) {
  Rule rule;
  parse(text, rule);
  return rule;
}

std::string problem(std::string_view text) {
  Rule rule;
  const ParseError error = parse(text, rule);
  return error.what == nullptr ? "none" : std::to_string(error.position) + ": " + error.what;
}

TEST(RuleParser, WorksAtCompileTime) {
  constexpr Rule rule = parsed("mn + mk, kn -> mn");
  static_assert(rule.inputs.size() == 3 && rule.outputs.size() == 1 && rule.num_terms == 2);
  static_assert(rule.inputs[0].term == 0 && rule.inputs[1].term == 1 && rule.inputs[2].term == 1);
  static_assert(rule.inputs[2].dims[0].letters == "k" && !rule.moves);
  constexpr RuleText text = "mk, kn -> mn";
  EXPECT_STREQ(text.text, "mk, kn -> mn");
}

TEST(RuleParser, ReadsEveryMark) {
  const Rule rule = parsed("!k@dim A..., [1@* (a=6 b)c], n? =>K@dim ...;pick a b ; size");
  ASSERT_EQ(rule.inputs.size(), 3u);
  const SlotPattern& first = rule.inputs[0];
  EXPECT_FALSE(first.linear);
  EXPECT_EQ(first.dims.size(), 3u);
  EXPECT_EQ(first.dims[0].at, "dim");
  EXPECT_EQ(first.dims[1].mark, Mark::whole);
  EXPECT_EQ(first.dims[2].mark, Mark::ellipsis);
  const SlotPattern& list = rule.inputs[1];
  EXPECT_TRUE(list.list);
  EXPECT_EQ(list.dims[0].mark, Mark::one);
  EXPECT_EQ(list.dims[0].at, "*");
  EXPECT_EQ(list.dims[1].mark, Mark::compound);
  EXPECT_EQ(list.dims[1].letters, "a=6 b");
  EXPECT_EQ(list.dims[2].letters, "c");
  EXPECT_TRUE(rule.inputs[2].optional);
  EXPECT_TRUE(rule.moves);
  ASSERT_EQ(rule.sizes.size(), 1u);
  EXPECT_EQ(rule.sizes[0].letter, 'a');
  EXPECT_EQ(rule.sizes[0].size, 6);
  ASSERT_EQ(rule.fixups.size(), 2u);
  EXPECT_EQ(rule.fixups[0].letters, "a b");
  EXPECT_TRUE(rule.has("size"));
  EXPECT_FALSE(rule.has("even"));
}

TEST(RuleParser, TellsReductionsFromLetters) {
  EXPECT_EQ(parsed("k@dim ... ->max ...").reduction, ReduceKind::max);
  EXPECT_EQ(parsed("k@dim ... ->min ...").reduction, ReduceKind::min);
  EXPECT_EQ(parsed("k@dim ... ->prod ...").reduction, ReduceKind::product);
  EXPECT_EQ(parsed("k@dim ... ->avg").reduction, ReduceKind::avg);
  EXPECT_EQ(parsed("axm -> max").reduction, ReduceKind::sum);
  EXPECT_EQ(parsed("axm -> max").outputs[0].dims.size(), 3u);
  EXPECT_EQ(parsed("mk,kn->mn").outputs[0].dims.size(), 2u);
}

TEST(RuleParser, AnEmptySlotIsATensorWithoutDims) {
  const Rule sum = parsed("... ->; mean");
  ASSERT_EQ(sum.outputs.size(), 1u);
  EXPECT_TRUE(sum.outputs[0].dims.empty());
  EXPECT_TRUE(sum.has("mean"));
  EXPECT_EQ(parsed(", ... -> ...").inputs.size(), 2u);
  EXPECT_EQ(parsed("!n, !n -> , ").outputs.size(), 2u);
}

TEST(RuleParser, UpperCaseLettersMayRepeat) {
  EXPECT_EQ(problem("...NN -> ...NN"), "none");
}

TEST(RuleParser, SaysWhatIsWrongAndWhere) {
  EXPECT_EQ(problem("mk, kn mn"), "7: expected an arrow \"->\" or \"=>\"");
  EXPECT_EQ(problem("mk; size -> m"), "2: expected an arrow \"->\" or \"=>\"");
  EXPECT_EQ(problem(""), "0: expected an arrow \"->\" or \"=>\"");
  EXPECT_EQ(problem("mm -> m"), "1: a letter stands twice in one slot");
  EXPECT_EQ(problem("a(ba) -> ab"), "1: a letter stands twice in one slot");
  EXPECT_EQ(problem("(aa) -> a"), "2: a letter stands twice in one slot");
  EXPECT_EQ(problem("... a ... -> a"), "6: a second \"...\" in one slot");
  EXPECT_EQ(problem("(ab -> ab"), "4: \"( )\" takes lower-case letters");
  EXPECT_EQ(problem("x -> (ab"), "5: expected \")\"");
  EXPECT_EQ(problem("(aB) -> ab"), "2: \"( )\" takes lower-case letters");
  EXPECT_EQ(problem("() -> a"), "1: \"( )\" takes lower-case letters");
  EXPECT_EQ(problem("[a -> a"), "3: expected \"]\"");
  EXPECT_EQ(problem("a] -> a"), "1: \"]\" without \"[\"");
  EXPECT_EQ(problem("a) -> a"), "1: \")\" without \"(\"");
  EXPECT_EQ(problem("a[b] -> a"), "1: \"[\" stands in front of a slot");
  EXPECT_EQ(problem("a! -> a"), "1: \"!\" stands in front of a slot");
  EXPECT_EQ(problem("a?? -> a"), "2: a second \"?\"");
  EXPECT_EQ(problem("a?b -> a"), "2: a dim after the end of a slot");
  EXPECT_EQ(problem("a@ -> a"), "2: expected the name of an argument after \"@\"");
  EXPECT_EQ(problem("...@dim -> a"), "3: \"@\" follows a letter or 1");
  EXPECT_EQ(problem("a= -> a"), "2: expected a size after \"=\"");
  EXPECT_EQ(problem("a=2, a=3 -> a"), "8: a second size of one letter");
  EXPECT_EQ(problem("1=2 -> a"), "1: a size follows a letter: a=6");
  EXPECT_EQ(problem("a & b -> a"), "2: unknown mark");
  EXPECT_EQ(problem("a -> a?"), "5: an output cannot be optional");
  EXPECT_EQ(problem("a -> a + b"), "7: a sum of terms stands left of the arrow only");
  EXPECT_EQ(problem("a -> a -> a"), "7: a second arrow");
  EXPECT_EQ(problem("a -> ..."), "5: \"...\" in an output, but in no input");
  EXPECT_EQ(problem("a -> a;"), "7: expected the name of a fix-up after \";\"");
  EXPECT_EQ(problem("a -> a; pick v"), "13: a fix-up names a letter that no input has");
  EXPECT_EQ(problem("a -> a; pick"), "12: pick takes the letter that indices choose from: pick v");
  EXPECT_EQ(problem("a -> a; size 3"), "13: a fix-up takes letters of the rule");
  EXPECT_EQ(problem("abcdefghi -> a"), "8: more than 8 dims in one slot");
}

TEST(RuleParser, LimitsAreSaid) {
  std::string many = "a";
  for (int i = 0; i < 20; ++i) many += ", a";
  EXPECT_EQ(problem(many + " -> a"), "62: more than 20 input slots");
  std::string outputs = "a -> a";
  for (int i = 0; i < 10; ++i) outputs += ", a";
  EXPECT_EQ(problem(outputs), "36: more than 10 outputs");
  EXPECT_EQ(problem("a -> a; b; c; d; e; f"), "21: more than 4 fix-ups");
}

TEST(RuleParser, RefusesSizesThatNoTensorHas) {
  EXPECT_EQ(problem("a=999999999999 -> a"), "none");
  EXPECT_EQ(problem("a=1000000000000 -> a"), "2: a size of more than 12 digits");
  EXPECT_EQ(problem("(ab=33333333333333333333)c -> a"), "4: a size of more than 12 digits");
}

TEST(RuleParser, RaisesWithThePlaceMarked) {
  EXPECT_EQ(serried::testing::error_text<c10::ValueError>(
                [] { parse_or_raise("register_sharding", "mylib::rope", "mk, kn mn"); }),
            "[register_sharding] rule for mylib::rope: expected an arrow \"->\" or \"=>\"\n"
            "  mk, kn mn\n"
            "         ^\n"
            "  fix: change the text at the mark; \"mk, kn -> mn\" is a rule, docs/rules.md has the grammar");
}

TEST(RuleParser, KeepsTextsGivenAtRunTime) {
  Rule rule;
  {
    const std::string text = "...d, !d -> ...d";
    rule = parse_or_raise("register_sharding", "mylib::rope", text);
  }
  EXPECT_EQ(rule.text, "...d, !d -> ...d");
  EXPECT_EQ(rule.inputs[0].dims[1].letters, "d");
  EXPECT_EQ(parse_or_raise("a", "b", std::string("...d, !d -> ...d")).text.data(), rule.text.data());
}

}  // namespace
}  // namespace serried::spmd
