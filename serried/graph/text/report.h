// What a run of a graph costs one rank: communication, memory, ops.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "serried/graph/graph.h"

namespace serried::graph {

/// The collectives of one kind over one group.
struct CollectiveUse {
  std::string kind;  // "all_reduce"
  std::string group;
  int64_t count = 0;
  int64_t bytes = 0;  // that this rank gives; that it gets, for recv
};

struct GraphReport {
  std::vector<CollectiveUse> collectives;            // most bytes first
  std::vector<std::pair<std::string, int64_t>> ops;  // by name, most frequent first; collectives included
  int64_t num_ops = 0;

  int64_t input_bytes = 0;
  int64_t persistent_bytes = 0;
  int64_t constant_bytes = 0;
  int64_t arena_bytes = 0;  // of planned buffers
  /// Computed values that live at once: each from the op that makes it to its last use, memory that several share
  /// counted once. What a kernel takes for itself is not seen.
  int64_t peak_bytes = 0;
  size_t peak_node = 0;  // the op during which that is

  int64_t collective_bytes() const;
  /// Everything above, as tables.
  std::string to_string() const;
};

GraphReport report(const Graph& graph);

}  // namespace serried::graph
