// Machines with round numbers.
#pragma once

#include <string>

#include "tools/serried/simulate/error.h"
#include "tools/serried/simulate/job.h"

namespace serried::simulation {

/// 1 ns per byte out of a host and into it, 10 us per step; memory and sums cost nothing unless a test says so.
inline Machine plain_machine(int64_t ranks_per_host) {
  Machine machine;
  machine.ranks_per_host = ranks_per_host;
  machine.nic_out.alpha_us = Fitted::exactly(10);
  machine.nic_out.beta_ns_per_byte = Fitted::exactly(1);
  machine.nic_in.beta_ns_per_byte = Fitted::exactly(1);
  return machine;
}

/// All that can cost something does.
inline Machine full_machine(int64_t ranks_per_host) {
  Machine machine = plain_machine(ranks_per_host);
  machine.cores_per_host = ranks_per_host;
  machine.memory = {Fitted::exactly(2), Fitted::exactly(0.125), Fitted::exactly(0.25)};
  machine.nic_in.alpha_us = Fitted::exactly(3);
  machine.nic_out.message_us = Fitted::exactly(1);
  machine.uplink = Uplink{.hosts = 2, .oversubscription = 4, .alpha_us = Fitted::exactly(5)};
  return machine;
}

template <class Call>
std::string error_of(const Call& call) {
  try {
    call();
  } catch (const SimulationError& error) {
    return error.what() + std::string("\n  fix: ") + error.fix();
  }
  return "";
}

}  // namespace serried::simulation
