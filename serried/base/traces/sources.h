// The files that are to be merged.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "serried/base/traces/reader.h"

namespace serried::trace {

struct Source {
  std::string path;
  bool is_named = false;  // by the user, not found in a folder
  uint64_t bytes = 0;
  TraceHead head = {};
  TraceEnd end = {};
  int clock = 0;  // number of its clock

  /// Whether it is a trace of single ranks.
  bool takes_part() const { return end.is_trace && !head.is_merged; }
};

/// Of folders, all *.json in them, in order. TraceError if one does not exist, cannot be read or has none.
std::vector<Source> find_sources(const std::vector<std::string>& inputs);

/// "path", as it may stand in a message.
std::string in_quotes(const std::string& path);

}  // namespace serried::trace
