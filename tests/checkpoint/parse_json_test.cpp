// JSON that anybody may have made: the same values as nlohmann's parser, at a cost that its length bounds.
#include "serried/checkpoint/parse_json.h"

#include <gtest/gtest.h>

#include "serried/checkpoint/failure.h"

namespace serried::testing {
namespace {

using checkpoint::detail::parse_json;
using nlohmann::json;

std::string refusal(const std::string& text) {
  try {
    parse_json(text, "f");
  } catch (const checkpoint::detail::Failure& failure) {
    return failure.text;
  }
  return "none";
}

TEST(ParseJson, GivesWhatNlohmannsParserGives) {
  for (const char* text :
       {"null", "true", "-3", "18446744073709551615", "1e300", "0.1", "\"a\\u00e4\\n\"", "[]", "{}", "[[],{},[1,[2]]]",
        R"({"a":{"b":[1,{"c":null}],"d":"x"},"e":[{"a":1},{"a":2}],"":{"":[]}})"}) {
    EXPECT_EQ(parse_json(text, "f"), json::parse(text)) << text;
  }
}

TEST(ParseJson, RefusesWhatIsNoStrictJson) {
  for (const char* text : {"", "{", "[1,]", "{} x", "{\"a\" 1}", "nul", "1e999", "\"\xff\"", "[1}"}) {
    EXPECT_EQ(refusal(text), "f is no JSON") << text;
  }
  EXPECT_EQ(refusal(R"({"a":[{"b":1,"c":{},"b":2}]})"), "f has the key \"b\" twice");
  EXPECT_EQ(refusal(std::string(100, '[') + std::string(100, ']')), "none");
  EXPECT_EQ(refusal(std::string(101, '[') + std::string(101, ']')), "f is nested too deeply");
}

// A parser that looks at all of them whenever one ends takes minutes for this.
TEST(ParseJson, ManySiblingsCostNoMoreThanTheirLength) {
  constexpr int kCount = 1000000;
  std::string text = "{\"x\":[{}";
  for (int i = 1; i < kCount; ++i) text += ",{}";
  EXPECT_EQ(parse_json(text + "]}", "f")["x"].size(), size_t(kCount));
  std::string keys = "{\"0\":{}";
  for (int i = 1; i < kCount / 4; ++i) keys += ",\"" + std::to_string(i) + "\":[]";
  EXPECT_EQ(parse_json(keys + "}", "f").size(), size_t(kCount / 4));
}

}  // namespace
}  // namespace serried::testing
