// Which memory each node reads and writes: what every pass has to know before it moves or drops one.
#pragma once

#include <cstdint>
#include <set>
#include <vector>

#include "serried/graph/graph.h"

namespace serried::graph {

/// An op of which nothing is known but its schema, such as a user's hook: it may keep what it is given.
bool is_opaque(const Node& node);

/// Whether argument `i` is written, also where the schema does not say so (running statistics of batch norm).
bool writes_argument(const Node& node, size_t i);

/// Whether the node does more than give results: writes, communicates, draws random numbers, or may do anything.
bool has_effects(const Node& node);

/// Whether the results are other names for the memory of the first argument, and nothing is written.
bool is_alias(const Graph& graph, const Node& node);

bool is_contiguous(const TensorMeta& meta);

/// A number that no value's storage has yet.
int32_t new_storage(const Graph& graph);

/// Numbers of storages.
struct Access {
  std::vector<int32_t> reads;
  std::vector<int32_t> writes;  // those that the node makes included
  bool is_barrier = false;      // touches memory that cannot be told
};

/// Per node. Whoever waits for a collective on its way writes what that collective touches.
std::vector<Access> accesses_of(const Graph& graph);

/// As accesses_of, but finer: parts of a storage that no value reaches across have numbers of their own, such as the
/// buckets that DDP makes in one piece of memory. The numbers are not those of the values.
std::vector<Access> accesses_of_parts(const Graph& graph);

/// Whether two nodes have to stay in their order.
bool in_conflict(const Access& a, const Access& b);

/// What holds for a storage during the whole run.
class Storages {
 public:
  explicit Storages(const Graph& graph);
  /// Whether somebody may see the memory after the run. True where the storage is unknown.
  bool escapes(ValueId id) const { return test(id, escaping_); }
  /// Whether a node gives a tensor on it other sizes, strides or memory. True where the storage is unknown.
  bool changes_layout(ValueId id) const { return test(id, restrided_); }

 private:
  bool test(ValueId id, const std::vector<bool>& flags) const;
  void mark(ValueId id, std::vector<bool>& flags);

  const Graph& graph_;
  std::vector<bool> escaping_;
  std::vector<bool> restrided_;
};

/// Storages whose values cannot be moved into another one: read as another dtype, or by an offset from their begin.
std::set<int32_t> immovable_storages(const Graph& graph);
/// All values of one storage lie in another from now on, `offset` elements behind its begin.
void move_values(Graph& graph, int32_t from, int32_t to, int64_t offset);

}  // namespace serried::graph
