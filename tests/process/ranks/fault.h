// One fault in one kind of call, and what must come of it.
#pragma once

#include <string>

namespace serried::testing {

inline constexpr const char* kFaults[] = {"kill", "stop", "slow", "memory"};

/// What `victim` suffers in a step of calls, `delay_us` after the step has begun.
struct Fault {
  std::string call;   // one of kFaultCalls
  std::string fault;  // one of kFaults
  std::string backend = "shm";
  int num_ranks = 3;
  int victim = 1;
  int step = 2;
  int delay_us = 0;
};

/// Whether ranks wait for each other in the store, where nobody sees a death before the timeout.
bool waits_in_store(const std::string& call);

/// Runs the ranks under the launcher. All must raise and name the victim, or all be right, as `fault` demands; nothing
/// may hang past the timeout or be left: processes, shared memory, descriptors.
void check_fault(const Fault& fault);

}  // namespace serried::testing
