// What a CommDebugMode has seen, and in which named region of the program.
#pragma once

#include <ATen/record_function.h>

#include <cstdint>
#include <optional>
#include <string>

#include "serried/comm/collectives/observe.h"
#include "serried/tensor/debug/comm_debug.h"
#include "serried/tensor/debug/module_tracker.h"

namespace serried {

namespace detail {

/// Enters and leaves a region; leaving takes what entering returned.
uint64_t enter_region(const std::string& name);
void leave_region(uint64_t first_node);

/// Remember which autograd nodes were made in which region from now on, or no more; calls nest.
void keep_region_history();
void drop_region_history();

struct Where {
  std::string path;
  bool backward = false;
};

/// The region this thread is in. Inside backward: the one whose forward made the node that runs.
Where current_region();

/// "all_gather x2 (1.5 KiB), all_reduce x1 (96 B)"
std::string calls_text(const std::map<std::string, CommDebugMode::Tally>& calls);

/// Begins and ends to tell the trackers of this thread of ops; calls nest.
void follow_ops();
void follow_no_ops();

/// The newest mode of this thread; null: there is none.
CommDebugMode::State*& newest_mode();

}  // namespace detail

struct CommDebugMode::State {
  std::vector<Region> regions;
  std::vector<Redistribution> redistributions;
  std::map<std::string, int64_t> defaults;
  std::map<std::string, OpCount> ops;
  std::optional<observe::Observer> observer;
  std::optional<at::CallbackHandle> op_callback;
  std::optional<detail::ModuleTracker> tracker;
  std::map<std::pair<int, bool>, ModuleCalls> modules;  // by number and whether they come after it
  State* outer = nullptr;

  /// The region's entry, made where there is none.
  Region& region(const std::string& path, bool backward);
  /// A module without calls, as the tracker found it.
  ModuleCalls described(const detail::ModuleTracker::Found& found) const;
  /// Counts a collective.
  void add(const observe::Call& call);
  /// Of all regions together.
  std::map<std::string, Tally> totals() const;
};

}  // namespace serried
