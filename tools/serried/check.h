// Collectives and training steps that are measured on a job's ranks, beside what the simulation says of them.
#pragma once

#include <string>
#include <vector>

#include "serried/comm/groups/group.h"
#include "tools/serried/simulate/machine.h"

namespace serried::tools {

struct CheckRow {
  std::string what;  // "all_reduce 768.0 KiB"
  double measured_us = 0;
  double simulated_us = 0;

  double ratio() const { return simulated_us / measured_us; }
};

/// Medians of `rounds`, of the slowest rank; every rank of `world` calls it, with the same machine. Of sizes that no
/// calibration measures; steps of `DistributedDataParallel` compute as the same net does on each rank alone.
std::vector<CheckRow> check(const Group& world, const simulation::Machine& machine, int rounds);

}  // namespace serried::tools
