// Simulations as text, and as a trace for the pages that show traces.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tools/serried/simulate/simulate.h"

namespace serried::simulation {

/// What is said of a job of one size.
struct Outcome {
  Job job = {};
  Simulation simulation = {};
  int64_t peak_bytes = 0;  // of a rank
};

/// "12.3 us", "4.56 ms", "78.9 s"
std::string time_text(Time time);

/// "mesh dp=4 tp=2"
std::string mesh_text(const std::vector<Axis>& axes);

/// A line for each outcome.
std::string step_table(const std::vector<Outcome>& outcomes);

/// A line for each collective of one of them.
std::string call_table(const Outcome& outcome);

/// What the numbers do not hold, for this machine.
std::string not_modelled(const Machine& machine);

/// Rank 0's step in the format of Chrome's traces, which https://ui.perfetto.dev shows.
std::string chrome_trace(const Outcome& outcome);

}  // namespace serried::simulation
