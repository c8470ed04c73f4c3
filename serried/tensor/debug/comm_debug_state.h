// What a CommDebugMode has seen.
#pragma once

#include <ATen/record_function.h>

#include <optional>

#include "serried/comm/collectives/observe.h"
#include "serried/tensor/debug/comm_debug.h"

namespace serried {

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
