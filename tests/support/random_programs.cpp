// Counts programs, prints seeds, and stops at the first failure.
#include "tests/support/random_programs.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <optional>
#include <string>

namespace serried::testing {
namespace {

std::optional<uint64_t> number_in(const char* variable) {
  const char* text = std::getenv(variable);
  if (text == nullptr || *text == '\0') return std::nullopt;
  return std::strtoull(text, nullptr, 10);
}

std::string name_of_this_test() {
  const ::testing::TestInfo* test = ::testing::UnitTest::GetInstance()->current_test_info();
  return std::string(test->test_suite_name()) + "." + test->name();
}

void run_one(uint64_t seed, const std::function<void(uint64_t)>& program) {
  try {
    program(seed);
  } catch (const std::exception& error) {
    ADD_FAILURE() << error.what();
  }
}

}  // namespace

void for_random_programs(int64_t count, const std::function<void(uint64_t)>& program) {
  using Clock = std::chrono::steady_clock;
  const std::optional<uint64_t> minutes = number_in("SERRIED_SOAK_MINUTES");
  const uint64_t first = number_in("SERRIED_SEED").value_or(1);
  const Clock::time_point end = Clock::now() + std::chrono::minutes(minutes.value_or(0));
  const std::string name = name_of_this_test();
  std::cout << name << ": seeds from " << first << std::endl;
  int64_t done = 0;
  const auto is_over = [&] { return minutes ? Clock::now() >= end : done >= count; };
  for (; !is_over() && !::testing::Test::HasFailure(); ++done) run_one(first + uint64_t(done), program);
  if (::testing::Test::HasFailure()) {
    std::cout << name << ": failed with seed " << first + uint64_t(done) - 1
              << "; again, alone: SERRIED_SEED=" << first + uint64_t(done) - 1
              << " <this program> --gtest_filter=" << name << std::endl;
  } else {
    std::cout << name << ": " << done << " programs, all right" << std::endl;
  }
}

}  // namespace serried::testing
