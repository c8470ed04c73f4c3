// Every input that is kept, once more: the seeds of the fuzzer and what it has found.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>

#include "tests/fuzz/target.h"

namespace serried::fuzz {
namespace {

std::string content_of(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

class FuzzInputs : public testing::TestWithParam<Target> {
 protected:
  static int run_all(const char* kind) {
    const std::filesystem::path folder = std::filesystem::path(SERRIED_FUZZ_INPUTS) / kind / GetParam().name;
    int count = 0;
    if (!std::filesystem::exists(folder)) return count;
    for (const auto& file : std::filesystem::directory_iterator(folder)) {
      SCOPED_TRACE(file.path().string());
      EXPECT_NO_THROW(GetParam().run(content_of(file.path())));
      ++count;
    }
    return count;
  }
};

TEST_P(FuzzInputs, SeedsAreReadOrRefused) {
  EXPECT_GT(run_all("corpus"), 0);
}

TEST_P(FuzzInputs, WhatWasFoundStaysFixed) {
  run_all("found");
}

TEST_P(FuzzInputs, AnyPrefixOfASeedIsReadOrRefused) {
  const std::filesystem::path folder = std::filesystem::path(SERRIED_FUZZ_INPUTS) / "corpus" / GetParam().name;
  ASSERT_FALSE(std::filesystem::is_empty(folder));
  for (const auto& file : std::filesystem::directory_iterator(folder)) {
    SCOPED_TRACE(file.path().string());
    const std::string content = content_of(file.path());
    const size_t step = content.size() / 64 + 1;
    for (size_t length = 0; length < content.size(); length += step) {
      EXPECT_NO_THROW(GetParam().run(content.substr(0, length))) << "of its first " << length << " bytes";
    }
  }
}

INSTANTIATE_TEST_SUITE_P(, FuzzInputs, testing::ValuesIn(kTargets), [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace serried::fuzz
