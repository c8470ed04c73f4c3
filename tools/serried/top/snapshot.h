// How a job is at one moment: a row for each rank of this host, and what there is to say about them.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "tools/serried/top/jobs.h"
#include "tools/serried/top/pages.h"

namespace serried::top {

enum class State { running, waiting, stopped, gone };

const char* state_text(State state);

/// Where a rank is in a group.
struct Place {
  std::string group = {};
  std::string call = {};     // "#183 all_reduce f32[512] sum"
  std::string part_of = {};  // "item()"; "" where the user called just that
  int64_t bytes = -1;        // -1: not known
  uint64_t sequence = 0;
};

struct Row {
  int rank = 0;
  int thread = -1;  // the rank's number where ranks are threads of one process; -1: they are not
  pid_t pid = 0;
  State state = State::running;
  Place place = {};                // of the call it waits in, or of its newest
  double waits_seconds = -1;       // -1: it does not wait
  std::vector<int> waits_on = {};  // the ranks that it waits for, ascending
  bool knows_on_whom = true;

  bool has_steps = false;
  double steps_per_second = -1;  // -1: not known
  double calls_per_second = -1;
  double cpu_percent = -1;
  int64_t resident_bytes = 0;
  int64_t shared_bytes = 0;

  // For the rates, by group: of groups that come and go only what both looks saw counts.
  struct Counts {
    uint64_t calls = 0;
    uint64_t steps = 0;
  };
  std::map<uint64_t, Counts> counts = {};
  uint64_t cpu_ticks = 0;
  uint64_t start_ticks = 0;
};

struct Snapshot {
  std::chrono::steady_clock::time_point time;
  Job job;
  std::vector<Row> rows = {};           // by rank
  std::vector<std::string> notes = {};  // whole sentences
};

/// Looks at what ranks publish and at what the kernel says. Never waits, whatever state the ranks are in. `before` is
/// the last look, for the rates; null at the first.
Snapshot look(Proc& proc, const Job& job, const Snapshot* before);

}  // namespace serried::top
