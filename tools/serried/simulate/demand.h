// What the steps of a call ask of the machine: time on each of its parts, and delays.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "tools/serried/simulate/collective.h"
#include "tools/serried/simulate/machine.h"
#include "tools/serried/simulate/time.h"

namespace serried::simulation {

/// Parts that hosts, or all hosts of an uplink, share.
enum class Part : uint8_t { memory, nic_out, nic_in, uplink_out, uplink_in };

struct Demand {
  struct Hold {
    Part part;
    size_t place;  // host, or uplink
    Time time;
  };
  std::vector<Hold> holds = {};
  Time least = 0;  // from its start, though nothing else runs
  Time after = 0;  // from when the last part is free
};

/// Of each step of a call on `hosts`, numbers that ascend, of which each has as many ranks as `sizes` says.
std::vector<Demand> demands_of(const Machine& machine, const Call& call, const std::vector<size_t>& hosts,
                               const HostSizes& sizes);

/// How long the call takes where nothing else runs.
Time time_alone(const std::vector<Demand>& demands);

}  // namespace serried::simulation
