// Kills, stops, pauses and lack of memory in every kind of call.
#include <gtest/gtest.h>

#include <iterator>
#include <string>
#include <tuple>
#include <vector>

#include "tests/process/ranks/fault.h"
#include "tests/process/ranks/fault_calls.h"

namespace serried::testing {
namespace {

class Faults : public ::testing::TestWithParam<std::tuple<std::string, std::string>> {};

TEST_P(Faults, EndInAnErrorThatNamesTheRankOrInTheRightResult) {
  const auto [fault, call] = GetParam();
  check_fault({.call = call, .fault = fault});
}

// As strings, which ctest can print.
auto texts(const auto& names) {
  return ::testing::ValuesIn(std::vector<std::string>(std::begin(names), std::end(names)));
}

INSTANTIATE_TEST_SUITE_P(In, Faults, ::testing::Combine(texts(kFaults), texts(kFaultCalls)),
                         [](const auto& info) { return std::get<0>(info.param) + "_" + std::get<1>(info.param); });

}  // namespace
}  // namespace serried::testing
