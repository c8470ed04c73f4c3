// The clocks of two hosts, by numbers.
#include "serried/launch/clock_offset.h"

#include <gtest/gtest.h>

#include <stdexcept>

namespace serried::launch {
namespace {

constexpr int64_t kSecond = 1'000'000'000;

TEST(ClockOffsets, AreThatOfTheMiddleOfTheWay) {
  ClockOffset clock;
  EXPECT_FALSE(clock.at(0));
  clock.add(100, 5150, 200);  // 50 ns there, 50 back
  ASSERT_TRUE(clock.at(200));
  EXPECT_EQ(clock.at(200)->offset_ns, 5000);
  EXPECT_EQ(clock.at(200)->error_ns, 51);
}

TEST(ClockOffsets, TheAnswerThatCameSoonestCounts) {
  ClockOffset clock;
  clock.add(1000, 9000, 1100);
  clock.add(2000, 99000, 12000);  // lay somewhere for long
  EXPECT_EQ(clock.at(12000)->offset_ns, 9000 - 1050);
  clock.add(20000, 28000, 20020);
  EXPECT_EQ(clock.at(20020)->offset_ns, 28000 - 20010);
}

TEST(ClockOffsets, WhatIsOldIsWorthLess) {
  ClockOffset clock;
  clock.add(0, 100, 20);
  EXPECT_EQ(clock.at(20 + 10 * kSecond)->error_ns, 11 + kSecond / 1000);
  clock.add(10 * kSecond, 10 * kSecond + 700'000, 10 * kSecond + 1'000'000);  // half a millisecond, but now
  EXPECT_EQ(clock.at(10 * kSecond + 1'000'000)->offset_ns, 200'000);
}

TEST(ClockOffsets, TimesThatAreNoneCountForNothing) {
  ClockOffset clock;
  clock.add(100, 50, 20);
  clock.add(-1, 50, 20);
  clock.add(1, -50, 20);
  clock.add(0, INT64_MAX, 20);
  clock.add(0, 5, INT64_MAX);
  EXPECT_FALSE(clock.at(0));
  EXPECT_EQ(nanoseconds_in("-12"), -12);
  for (const char* text : {"", "1 ", "x", "99999999999999999999"}) {
    EXPECT_THROW(nanoseconds_in(text), std::runtime_error) << text;
  }
}

}  // namespace
}  // namespace serried::launch
