// Reads and writes per node, by number of storage.
#include "serried/graph/passes/access.h"

#include <c10/util/strides.h>

#include <algorithm>
#include <map>
#include <unordered_map>

namespace serried::graph {
namespace {

bool is_aten(const Node& node) {
  return node.op.operator_name().name.starts_with("aten::");
}

bool is_ours(const Node& node) {
  return node.op.operator_name().name.starts_with("serried::");
}

bool calls_user(const Node& node) {
  return node.op.operator_name().name == "serried::call_hook";
}

bool restrides(const Node& node) {
  const std::string& name = node.op.operator_name().name;
  return node.op.hasTag(at::Tag::inplace_view) || name.starts_with("aten::set_") || name.starts_with("aten::resize");
}

void add_unique(std::vector<int32_t>& numbers, int32_t number) {
  if (std::find(numbers.begin(), numbers.end(), number) == numbers.end()) numbers.push_back(number);
}

bool share_one(const std::vector<int32_t>& a, const std::vector<int32_t>& b) {
  return std::any_of(a.begin(), a.end(), [&](int32_t x) { return std::find(b.begin(), b.end(), x) != b.end(); });
}

// What collectives on their way touch.
using InFlight = std::unordered_map<ValueId, std::vector<int32_t>>;

void add_operands(const Graph& graph, const Node& node, const InFlight& in_flight, Access& access) {
  for (size_t i = 0; i < node.arguments.size(); ++i) {
    const bool is_written = writes_argument(node, i);
    for (ValueId id : node.arguments[i].ids) {
      if (id == kNoValue) continue;
      const Value& value = graph.value(id);
      if (value.kind == ValueKind::work) {
        const auto found = in_flight.find(id);
        if (found == in_flight.end()) continue;
        for (int32_t storage : found->second) add_unique(access.writes, storage);
      } else if (value.storage < 0) {
        access.is_barrier = true;
      } else {
        add_unique(is_written ? access.writes : access.reads, value.storage);
      }
    }
  }
}

Access access_of(const Graph& graph, const Node& node, InFlight& in_flight) {
  Access access;
  access.is_barrier = is_opaque(node);
  add_operands(graph, node, in_flight, access);
  const std::vector<int32_t> read = access.reads;
  for_each_result(node, [&](ValueId id) {
    const Value& value = graph.value(id);
    if (value.kind == ValueKind::work) return;
    if (value.storage < 0) {
      access.is_barrier = true;
      return;
    }
    // A view writes nothing.
    if (std::find(read.begin(), read.end(), value.storage) == read.end()) add_unique(access.writes, value.storage);
  });
  for_each_result(node, [&](ValueId id) {
    if (graph.value(id).kind != ValueKind::work) return;
    std::vector<int32_t>& touched = in_flight[id];
    touched = access.writes;
    for (int32_t storage : access.reads) add_unique(touched, storage);
  });
  return access;
}

struct Reach {
  int32_t storage;
  int64_t begin, end;  // bytes, from the begin of the storage
  ValueId value;
};

// The next argument may lie elsewhere in its storage.
std::set<int32_t> storages_of_inputs(const Graph& graph) {
  std::set<int32_t> found;
  for (ValueId id : graph.inputs()) {
    if (id != kNoValue) found.insert(graph.value(id).storage);
  }
  return found;
}

Reach reach_of(const Graph& graph, ValueId id, const Storages& storages, const std::set<int32_t>& of_inputs) {
  const Value& value = graph.value(id);
  const bool is_told = value.meta.strides.size() == value.meta.sizes.size() && !storages.changes_layout(id) &&
                       of_inputs.count(value.storage) == 0;
  if (!is_told) return {value.storage, 0, INT64_MAX, id};
  return {value.storage, value.meta.offset * int64_t(c10::elementSize(value.meta.dtype)), value.meta.storage_end(), id};
}

// Gives each part of a storage that no value reaches across a number of its own.
void part_storages(Graph& graph) {
  const Storages storages(graph);
  const std::set<int32_t> of_inputs = storages_of_inputs(graph);
  std::vector<Reach> reaches;
  for (size_t id = 0; id < graph.values().size(); ++id) {
    if (graph.value(ValueId(id)).storage >= 0) reaches.push_back(reach_of(graph, ValueId(id), storages, of_inputs));
  }
  const auto place = [](const Reach& reach) { return std::pair(reach.storage, reach.begin); };
  std::sort(reaches.begin(), reaches.end(), [&](const Reach& a, const Reach& b) { return place(a) < place(b); });
  int32_t part = -1, storage = -1;
  int64_t end = 0;
  for (const Reach& reach : reaches) {
    if (reach.storage != storage || reach.begin >= end) {
      ++part;
      storage = reach.storage;
      end = reach.end;
    }
    end = std::max(end, reach.end);
    graph.value(reach.value).storage = part;
  }
}

}  // namespace

bool is_opaque(const Node& node) {
  return !is_aten(node) && !node.is_collective() && (!is_ours(node) || calls_user(node));
}

bool writes_argument(const Node& node, size_t i) {
  if (is_written(node.op.schema(), i)) return true;
  return node.op.schema().arguments()[i].name().starts_with("running_");
}

bool has_effects(const Node& node) {
  if (!is_aten(node) || is_random(node.op) || node.results.empty()) return true;
  for (size_t i = 0; i < node.arguments.size(); ++i) {
    if (writes_argument(node, i)) return true;
  }
  return false;
}

bool is_alias(const Graph& graph, const Node& node) {
  if (has_effects(node) || node.arguments.empty()) return false;
  const Argument& base = node.arguments[0];
  if (base.kind != Argument::Kind::value || base.ids[0] == kNoValue) return false;
  const int32_t storage = graph.value(base.ids[0]).storage;
  bool shares = storage >= 0;
  for_each_result(node, [&](ValueId id) { shares &= graph.value(id).storage == storage; });
  return shares;
}

bool is_contiguous(const TensorMeta& meta) {
  return meta.strides == c10::contiguous_strides(meta.sizes);
}

int32_t new_storage(const Graph& graph) {
  int32_t last = -1;
  for (const Value& value : graph.values()) last = std::max(last, value.storage);
  return last + 1;
}

std::vector<Access> accesses_of(const Graph& graph) {
  std::vector<Access> accesses;
  accesses.reserve(graph.nodes().size());
  InFlight in_flight;
  for (const Node& node : graph.nodes()) accesses.push_back(access_of(graph, node, in_flight));
  return accesses;
}

std::vector<Access> accesses_of_parts(const Graph& graph) {
  Graph parted = graph;
  part_storages(parted);
  return accesses_of(parted);
}

bool in_conflict(const Access& a, const Access& b) {
  if (a.is_barrier || b.is_barrier) return true;
  return share_one(a.writes, b.writes) || share_one(a.writes, b.reads) || share_one(a.reads, b.writes);
}

Storages::Storages(const Graph& graph)
    : graph_(graph), escaping_(size_t(new_storage(graph))), restrided_(escaping_.size()) {
  const std::vector<bool> escapes = graph.escaping();
  for (size_t id = 0; id < escapes.size(); ++id) {
    if (escapes[id]) mark(ValueId(id), escaping_);
  }
  for (const Node& node : graph.nodes()) {
    // What is opaque may keep its operands.
    if (is_opaque(node)) for_each_operand(node, [&](ValueId id) { mark(id, escaping_); });
    if (restrides(node)) for_each_operand(node, [&](ValueId id) { mark(id, restrided_); });
  }
}

void Storages::mark(ValueId id, std::vector<bool>& flags) {
  const int32_t storage = graph_.value(id).storage;
  if (storage >= 0) flags[size_t(storage)] = true;
}

bool Storages::test(ValueId id, const std::vector<bool>& flags) const {
  const int32_t storage = graph_.value(id).storage;
  return storage < 0 || flags[size_t(storage)];
}

std::set<int32_t> immovable_storages(const Graph& graph) {
  std::set<int32_t> found;
  std::map<int32_t, at::ScalarType> dtypes;
  const Storages storages(graph);
  for (size_t id = 0; id < graph.values().size(); ++id) {
    const Value& value = graph.value(ValueId(id));
    const at::ScalarType dtype = dtypes.emplace(value.storage, value.meta.dtype).first->second;
    if (dtype != value.meta.dtype || storages.changes_layout(ValueId(id))) found.insert(value.storage);
  }
  for (const Node& node : graph.nodes()) {
    if (!node.op.operator_name().name.starts_with("aten::as_strided")) continue;
    for_each_operand(node, [&](ValueId id) { found.insert(graph.value(id).storage); });
  }
  return found;
}

void move_values(Graph& graph, int32_t from, int32_t to, int64_t offset) {
  for (Value& value : graph.values()) {
    if (value.storage != from) continue;
    value.storage = to;
    value.meta.offset += offset;
  }
}

}  // namespace serried::graph
