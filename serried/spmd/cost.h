// What moving a tensor from one placement to another costs on one mesh axis, by a simple replaceable model.
#pragma once

#include <cstdint>

#include "serried/mesh/placement.h"

namespace serried::spmd {

/// Microseconds of latency per collective and bytes per microsecond; measured on shared memory, only ratios matter.
struct CostModel {
  double latency = 2.0;
  double bandwidth = 4000.0;        // bytes per microsecond through a collective
  double copy_bandwidth = 10000.0;  // of a local slice or fill
  double copy_latency = 0.2;
};

const CostModel& cost_model();
void set_cost_model(const CostModel& model);

/// Bytes this rank sends when `bytes` (the whole tensor as it lies on the other axes) goes from `from` to `to` over
/// `ranks` ranks.
int64_t bytes_sent(const Placement& from, const Placement& to, int64_t bytes, int64_t ranks);

/// Microseconds for it; infinity where there is no way (Shard to Partial, one Partial to another).
double move_cost(const Placement& from, const Placement& to, int64_t bytes, int64_t ranks);

}  // namespace serried::spmd
