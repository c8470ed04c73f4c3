// Faults at random moments of random calls; `make soak` runs them for as long as one likes.
#include <gtest/gtest.h>

#include <iterator>
#include <random>

#include "tests/process/ranks/fault.h"
#include "tests/process/ranks/fault_calls.h"
#include "tests/support/random_programs.h"

namespace serried::testing {
namespace {

TEST(RandomFaults, NeverHangNorLie) {
  for_random_programs(8, [](uint64_t seed) {
    std::mt19937_64 dice(seed);
    const int num_ranks = 2 + int(dice() % 3);
    check_fault({.call = kFaultCalls[dice() % std::size(kFaultCalls)],
                 .fault = kFaults[dice() % std::size(kFaults)],
                 .backend = dice() % 3 == 0 ? "gloo" : "shm",
                 .num_ranks = num_ranks,
                 .victim = int(dice() % uint64_t(num_ranks)),
                 .step = int(dice() % 5),
                 .delay_us = int(dice() % 6000)});
  });
}

}  // namespace
}  // namespace serried::testing
