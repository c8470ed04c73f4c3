// Measures what a simulated machine is made of, on the ranks of a job.
#pragma once

#include "serried/comm/groups/group.h"
#include "tools/serried/simulate/machine.h"

namespace serried::tools {

struct CalibrateOptions {
  int64_t ranks_per_host = 1;
  int rounds = 15;  // times each size is measured
};

/// What all ranks of `world` find together; every rank calls it. Consecutive ranks share hosts, as many on each. On one
/// host nothing is known of links: nic_out and nic_in are as slow as nothing, and the caller says so.
simulation::Machine calibrate(const Group& world, const CalibrateOptions& options);

}  // namespace serried::tools
