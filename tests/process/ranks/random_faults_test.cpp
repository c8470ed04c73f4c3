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
    Fault fault{.call = kFaultCalls[dice() % std::size(kFaultCalls)],
                .fault = kFaults[dice() % std::size(kFaults)],
                .backend = dice() % 3 == 0 ? "gloo" : "shm",
                .num_ranks = 2 + int(dice() % 3),
                .step = int(dice() % 5),
                .delay_us = int(dice() % 6000)};
    fault.victim = int(dice() % uint64_t(fault.num_ranks));
    // Threads of gloo's own may end a process that has no memory, and say of a failure what but not where it was.
    if (fault.fault == "memory") fault.backend = "shm";
    // A stopped rank 0 stops its store, for which c10d waits without limit; one without memory serves nobody, and may
    // crash in c10's own report of that: see docs/limits.md.
    const bool is_store_lost = fault.fault == "stop" || fault.fault == "memory";
    if (is_store_lost && waits_in_store(fault.call)) fault.victim = fault.num_ranks - 1;
    check_fault(fault);
  });
}

}  // namespace
}  // namespace serried::testing
