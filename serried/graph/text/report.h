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

/// The nodes of one phase.
struct PhaseUse {
  Phase phase = Phase::other;
  int64_t count = 0;
  int64_t bytes = 0;  // that they write; views write none
};

struct GraphReport {
  std::vector<CollectiveUse> collectives;            // most bytes first
  std::vector<PhaseUse> phases;                      // forward, backward, collective, optimizer, other: which there are
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

/// How a report counts the node: collectives and waits for them as such, others by their own phase.
Phase reported_phase(const Node& node);

/// Bytes of what the node makes or writes, views of what was there not counted.
int64_t written_bytes(const Graph& graph, const Node& node);

/// During each node, the bytes of computed values that live: what `peak_bytes` is the most of.
std::vector<int64_t> live_bytes(const Graph& graph);

}  // namespace serried::graph
