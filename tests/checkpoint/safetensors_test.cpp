// Headers of safetensors files: what is written, and what is refused.
#include "serried/checkpoint/safetensors.h"

#include <gtest/gtest.h>

#include "serried/checkpoint/failure.h"

namespace serried::checkpoint::detail {
namespace {

std::string refusal(const std::string& json, int64_t data_bytes = 0) {
  try {
    parse_header(json, data_bytes);
  } catch (const Failure& failure) {
    return failure.text;
  }
  return "taken";
}

std::string one_tensor(const std::string& dtype, const std::string& shape, const std::string& offsets) {
  return R"({"a":{"dtype":")" + dtype + R"(","shape":)" + shape + R"(,"data_offsets":)" + offsets + "}}";
}

constexpr const char* kStart = "the header is not that of a safetensors file: ";

TEST(Safetensors, AHeaderComesBackAsItWasWritten) {
  FileHeader header;
  header.metadata = {{"format", "pt"}};
  header.tensors = {{"w \"quoted\"", c10::ScalarType::Double, {2, 3}, 0, 48},
                    {"b", c10::ScalarType::BFloat16, {}, 48, 50}};
  const std::string text = header_text(header);
  EXPECT_EQ(text.size() % 64, 0u);
  const int64_t length = header_length(text, int64_t(text.size()) + 50);
  EXPECT_EQ(size_t(length) + 8, text.size());
  const FileHeader back = parse_header(text.substr(8), 50);
  EXPECT_EQ(back.num_bytes, int64_t(text.size()));
  EXPECT_EQ(back.metadata, header.metadata);
  ASSERT_EQ(back.tensors.size(), 2u);
  EXPECT_EQ(back.tensors[0].name, "w \"quoted\"");
  EXPECT_EQ(back.tensors[0].sizes, (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(back.tensors[1].dtype, c10::ScalarType::BFloat16);
  EXPECT_EQ(back.tensors[1].end, 50);
}

TEST(Safetensors, AFileWithoutTensorsIsFine) {
  EXPECT_EQ(refusal("{}"), "taken");
  EXPECT_EQ(refusal("{}   "), "taken");
}

TEST(Safetensors, EmptyTensorsTakeNoRoom) {
  EXPECT_EQ(refusal(one_tensor("F32", "[0,9223372036854775807,5]", "[0,0]")), "taken");
}

TEST(Safetensors, WhatIsNotTheFormatIsRefused) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"", "it does not begin with {"},
      {"[]", "it does not begin with {"},
      {"{", "no JSON at byte 2"},
      {"{} x", "no JSON at byte 4"},
      {R"({"a":1})", "a number at \"a\""},
      {R"({"a":null})", "null at \"a\""},
      {R"({"a":{"dtype":"F32","shape":[1.5],"data_offsets":[0,4]}})", "a number with a fraction at \"shape\""},
      {R"({"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}})", "a negative number at \"shape\""},
      {R"({"a":{"dtype":"F32","shape":[18446744073709551615],"data_offsets":[0,4]}})",
       "a number beyond 63 bits at \"shape\""},
      {R"({"a":{"dtype":"F32","shape":[[1]],"data_offsets":[0,4]}})", "a list at \"shape\""},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"more":1}})", "the key \"more\" at \"data_offsets\""},
      {R"({"a":{"dtype":"F32","dtype":"F32"}})", "the key \"dtype\" twice at \"dtype\""},
      {R"({"a":{"dtype":"F32","shape":[1]}})", "tensor \"a\" lacks dtype, shape or data_offsets"},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4,8]}})", "tensor \"a\" has 3 data_offsets"},
      {R"({"__metadata__":{"a":1}})", "a number at \"a\""},
      {R"({"__metadata__":{"a":"1","a":"2"}})", "the key \"a\" twice at \"a\""},
      {R"({"__metadata__":{},"__metadata__":{}})", "the name \"__metadata__\" twice at \"__metadata__\""},
  };
  for (const auto& [json, what] : cases) EXPECT_EQ(refusal(json, 4), kStart + what) << json;
}

TEST(Safetensors, ANameThatStandsTwiceIsRefused) {
  const std::string one = R"("a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]})";
  EXPECT_EQ(refusal("{" + one + "," + one + "}", 1), std::string(kStart) + "the name \"a\" twice at \"data_offsets\"");
}

TEST(Safetensors, AnUnknownDtypeIsNamed) {
  EXPECT_EQ(refusal(one_tensor("F4", "[1]", "[0,4]"), 4), "tensor \"a\" has the unknown dtype \"F4\"");
}

TEST(Safetensors, OverlapsGapsAndWrongSizesAreRefused) {
  const auto two = [](const std::string& first, const std::string& second) {
    return R"({"a":{"dtype":"U8","shape":[4],"data_offsets":)" + first +
           R"(},"b":{"dtype":"U8","shape":[4],"data_offsets":)" + second + "}}";
  };
  EXPECT_EQ(refusal(two("[4,8]", "[0,4]"), 8), "taken");
  EXPECT_EQ(
      refusal(two("[0,4]", "[3,7]"), 7),
      std::string(kStart) + "tensor \"b\" lies in bytes 3 to 7 and overlaps with the one before, which ends at 4");
  EXPECT_EQ(refusal(two("[0,4]", "[5,9]"), 9),
            std::string(kStart) + "tensor \"b\" lies in bytes 5 to 9, behind a gap from 4");
  EXPECT_EQ(refusal(two("[0,4]", "[4,9]"), 9),
            std::string(kStart) + "tensor \"b\" lies in bytes 4 to 9 and needs 4 bytes");
  EXPECT_EQ(refusal(two("[0,4]", "[4,3]"), 8),
            std::string(kStart) + "tensor \"b\" lies in bytes 4 to 3 and needs 4 bytes");
  EXPECT_EQ(refusal(two("[0,4]", "[4,8]"), 9), "the tensors take 8 bytes, and the file has 9 for them");
  EXPECT_EQ(refusal(two("[0,4]", "[4,8]"), 7), "the tensors take 8 bytes, and the file has 7 for them");
}

TEST(Safetensors, SizesThatOverflowAreRefused) {
  EXPECT_EQ(refusal(one_tensor("F64", "[4294967296,4294967296]", "[0,0]")),
            std::string(kStart) + "a tensor of sizes [4294967296,4294967296]");
  EXPECT_EQ(refusal(one_tensor("F64", "[9223372036854775807]", "[0,9223372036854775807]")),
            std::string(kStart) + "a tensor of sizes [9223372036854775807]");
}

TEST(Safetensors, DeepAndLongJsonIsRefusedWhereItBegins) {
  EXPECT_EQ(refusal("{\"a\":" + std::string(1'000'000, '[')), std::string(kStart) + "a list at \"a\"");
  std::string nested;
  for (int i = 0; i < 100'000; ++i) nested += "{\"a\":";
  EXPECT_EQ(refusal(nested), std::string(kStart) + "the key \"a\" at \"a\"");
  std::string many = R"({"a":{"dtype":"U8","shape":[)";
  for (int i = 0; i < 1'000'000; ++i) many += "1,";
  EXPECT_EQ(refusal(many), std::string(kStart) + "a list of more than 64 numbers at \"shape\"");
}

TEST(Safetensors, ALengthThatCannotBeIsRefused) {
  const auto refused = [](const std::string& first, int64_t file_bytes) -> std::string {
    try {
      header_length(first, file_bytes);
    } catch (const Failure& failure) {
      return failure.text;
    }
    return "taken";
  };
  EXPECT_EQ(refused("abc", 3), std::string(kStart) + "a file of 3 bytes");
  EXPECT_EQ(refused(std::string(8, '\xff'), 100),
            std::string(kStart) + "it would have 18446744073709551615 bytes, and may have 100000000");
  EXPECT_EQ(refused(std::string("\x10\0\0\0\0\0\0\0", 8), 20),
            std::string(kStart) + "it would have 16 bytes in a file of 20");
  EXPECT_EQ(refused(std::string("\x0c\0\0\0\0\0\0\0", 8), 20), "taken");
}

}  // namespace
}  // namespace serried::checkpoint::detail
