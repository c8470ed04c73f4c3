// Simulated time: whole picoseconds, so that sums are the same in any order and equal ranks stay equal.
#pragma once

#include <cmath>
#include <cstdint>

#include "tools/serried/simulate/error.h"

namespace serried::simulation {

using Time = int64_t;
inline constexpr Time kPerNanosecond = 1000;
inline constexpr Time kPerMicrosecond = 1000 * kPerNanosecond;

[[noreturn]] inline void raise_too_long() {
  throw SimulationError("the step takes longer than 100 days", "make the model or the numbers of the machine smaller");
}

inline Time time_of_ns(double nanoseconds) {
  constexpr double kMost = 8e15;
  if (!(nanoseconds < kMost)) raise_too_long();
  return Time(std::llround(nanoseconds * double(kPerNanosecond)));
}

inline Time time_of_us(double microseconds) {
  return time_of_ns(microseconds * 1e3);
}

inline double to_us(Time time) {
  return double(time) / double(kPerMicrosecond);
}

inline Time sum_of(Time a, Time b) {
  Time sum = 0;
  if (__builtin_add_overflow(a, b, &sum)) raise_too_long();
  return sum;
}

inline Time product_of(Time time, int64_t count) {
  Time product = 0;
  if (__builtin_mul_overflow(time, count, &product)) raise_too_long();
  return product;
}

}  // namespace serried::simulation
