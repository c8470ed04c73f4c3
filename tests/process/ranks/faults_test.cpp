// Kills, stops, pauses and lack of memory in every kind of call.
#include <gtest/gtest.h>

#include <string>
#include <tuple>

#include "tests/process/ranks/fault.h"
#include "tests/process/ranks/fault_calls.h"

namespace serried::testing {
namespace {

class Faults : public ::testing::TestWithParam<std::tuple<std::string, std::string>> {};

TEST_P(Faults, EndInAnErrorThatNamesTheRankOrInTheRightResult) {
  const auto [fault, call] = GetParam();
  check_fault({.call = call, .fault = fault});
}

INSTANTIATE_TEST_SUITE_P(In, Faults, ::testing::Combine(::testing::ValuesIn(kFaults), ::testing::ValuesIn(kFaultCalls)),
                         [](const auto& info) { return std::get<0>(info.param) + "_" + std::get<1>(info.param); });

}  // namespace
}  // namespace serried::testing
