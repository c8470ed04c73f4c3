// What a CommDebugMode has seen, and in which named region of the program.
#pragma once

#include <ATen/record_function.h>

#include <cstdint>
#include <optional>
#include <string>

#include "serried/comm/collectives/observe.h"
#include "serried/tensor/debug/comm_debug.h"

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

}  // namespace detail

struct CommDebugMode::State {
  std::vector<Region> regions;
  std::vector<Redistribution> redistributions;
  std::map<std::string, int64_t> defaults;
  std::map<std::string, OpCount> ops;
  std::optional<observe::Observer> observer;
  std::optional<at::CallbackHandle> op_callback;
  State* outer = nullptr;

  /// The region's entry, made where there is none.
  Region& region(const std::string& path, bool backward);
  /// Of all regions together.
  std::map<std::string, Tally> totals() const;
};

}  // namespace serried
