// Runs a job in simulated time.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tools/serried/simulate/places.h"

namespace serried::simulation {

/// What rank 0 did from `begin` to `end`.
struct Span {
  std::string name;
  std::string row;  // "compute", or the axis of a collective
  Time begin = 0;
  Time end = 0;
};

/// All of the calls of one kind and size on an axis that rank 0 made.
struct CallUse {
  AxisCall call;
  int64_t count = 0;
  Time alone = 0;   // each, where nothing else runs
  Time taken = 0;   // all, from when a call's turn has come until it ends
  Time waited = 0;  // all: how long the rank stood still for them
};

struct Simulation {
  Time step = 0;     // until the last rank is done
  Time compute = 0;  // of the rank that computes most
  std::vector<CallUse> calls;
  std::vector<Span> spans;  // of rank 0
  std::vector<Time> ends;   // of classes of ranks
  Places places;

  /// What the step takes longer for communication.
  Time exposed() const { return step - compute; }
};

/// Deterministic: the same job gives the same numbers. Collectives that come to a part of the machine at one moment
/// share it until all of them are through, those that come later wait for it. SimulationError where ranks wait for
/// what nobody issues.
Simulation simulate(const Job& job, const PlacesOptions& options = {});

/// How many standard deviations above the mean the largest of `count` normally distributed numbers is expected.
double expected_maximum(int64_t count);

/// What the step takes longer, since every rank waits for the slowest one: sigma of what it computes, at its expected
/// maximum over all ranks.
Time jitter_of(const Job& job, const Simulation& simulation);

}  // namespace serried::simulation
