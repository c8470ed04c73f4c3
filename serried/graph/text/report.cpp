// Counts what a graph does, and walks it once for the memory that lives.
#include "serried/graph/text/report.h"

#include <algorithm>
#include <limits>
#include <map>
#include <numeric>
#include <set>

#include "serried/base/text.h"
#include "serried/graph/text/text.h"

namespace serried::graph {
namespace {

using serried::detail::bytes_text;

constexpr size_t kShownOps = 12;

// Memory that one or more values share.
struct Memory {
  int64_t bytes = 0;
  ValueKind owner = ValueKind::computed;
  size_t first = std::numeric_limits<size_t>::max();  // node
  size_t last = 0;
};

// What lives longest owns memory that is shared: a view of a parameter costs nothing.
int precedence_of(ValueKind kind) {
  switch (kind) {
    case ValueKind::persistent: return 5;
    case ValueKind::constant: return 4;
    case ValueKind::input: return 3;
    case ValueKind::buffer: return 2;
    default: return 1;
  }
}

class Memories {
 public:
  explicit Memories(const Graph& graph) : of_value_(graph.values().size()) {
    std::map<int32_t, size_t> by_storage;
    for (size_t id = 0; id < of_value_.size(); ++id) {
      const Value& value = graph.value(ValueId(id));
      const auto [found, is_new] = by_storage.emplace(value.storage, memories_.size());
      const bool is_shared = value.storage >= 0 && !is_new;
      of_value_[id] = is_shared ? found->second : memories_.size();
      if (!is_shared) memories_.push_back({.owner = value.kind});
      Memory& memory = memories_[of_value_[id]];
      if (precedence_of(value.kind) > precedence_of(memory.owner)) memory.owner = value.kind;
      if (value.kind != ValueKind::work) memory.bytes = std::max(memory.bytes, value.meta.storage_end());
    }
    for (size_t i = 0; i < graph.nodes().size(); ++i) {
      for_each_operand(graph.nodes()[i], [&](ValueId id) { touch(id, i); });
      for_each_result(graph.nodes()[i], [&](ValueId id) { touch(id, i); });
    }
    const std::vector<bool> escapes = graph.escaping();
    for (size_t id = 0; id < escapes.size(); ++id) {
      if (escapes[id]) at(id).last = graph.nodes().size();
    }
  }

  int64_t bytes_of(ValueKind owner) const {
    int64_t bytes = 0;
    for (const Memory& memory : memories_) bytes += memory.owner == owner ? memory.bytes : 0;
    return bytes;
  }

  const std::vector<Memory>& all() const { return memories_; }

 private:
  Memory& at(size_t id) { return memories_[of_value_[id]]; }
  void touch(ValueId id, size_t node) {
    at(id).first = std::min(at(id).first, node);
    at(id).last = std::max(at(id).last, node);
  }

  std::vector<Memory> memories_;
  std::vector<size_t> of_value_;
};

std::vector<int64_t> live_bytes(const Graph& graph, const Memories& memories) {
  std::vector<int64_t> live(graph.nodes().size() + 2);
  for (const Memory& memory : memories.all()) {
    if (memory.owner != ValueKind::computed || memory.first > memory.last) continue;
    live[memory.first] += memory.bytes;
    live[memory.last + 1] -= memory.bytes;
  }
  std::partial_sum(live.begin(), live.end(), live.begin());
  live.resize(graph.nodes().size());
  return live;
}

void find_peak(const Graph& graph, const Memories& memories, GraphReport& result) {
  const std::vector<int64_t> live = live_bytes(graph, memories);
  const auto peak = std::max_element(live.begin(), live.end());
  if (peak == live.end()) return;
  result.peak_bytes = *peak;
  result.peak_node = size_t(peak - live.begin());
}

std::vector<PhaseUse> phases_of(const Graph& graph) {
  std::vector<PhaseUse> uses;
  for (Phase phase : {Phase::forward, Phase::backward, Phase::collective, Phase::optimizer, Phase::other}) {
    uses.push_back({.phase = phase});
  }
  for (const Node& node : graph.nodes()) {
    const Phase phase = reported_phase(node);
    PhaseUse& use =
        *std::find_if(uses.begin(), uses.end(), [&](const PhaseUse& candidate) { return candidate.phase == phase; });
    ++use.count;
    use.bytes += written_bytes(graph, node);
  }
  std::erase_if(uses, [](const PhaseUse& use) { return use.count == 0; });
  return uses;
}

std::string padded(const std::string& text, size_t width, bool to_the_right = false) {
  const std::string spaces(width > text.size() ? width - text.size() : 0, ' ');
  return to_the_right ? spaces + text : text + spaces;
}

std::string collectives_table(const GraphReport& report) {
  size_t kind_width = 10, group_width = 5;
  for (const CollectiveUse& use : report.collectives) {
    kind_width = std::max(kind_width, use.kind.size());
    group_width = std::max(group_width, use.group.size());
  }
  const auto row = [&](const std::string& kind, const std::string& group, const std::string& count,
                       const std::string& bytes) {
    return "  " + padded(kind, kind_width) + "  " + padded(group, group_width) + padded(count, 8, true) +
           padded(bytes, 13, true) + "\n";
  };
  std::string text = row("collective", "group", "calls", "bytes");
  int64_t calls = 0;
  for (const CollectiveUse& use : report.collectives) {
    text += row(use.kind, use.group, std::to_string(use.count), bytes_text(use.bytes));
    calls += use.count;
  }
  return text + row("total", "", std::to_string(calls), bytes_text(report.collective_bytes()));
}

bool is_known(const PhaseUse& use) {
  return use.phase != Phase::other && use.phase != Phase::collective;
}

std::string phases_table(const GraphReport& report) {
  const auto row = [](std::string_view phase, const std::string& count, const std::string& bytes) {
    return "  " + padded(std::string(phase), 12) + padded(count, 8, true) + padded(bytes, 13, true) + "\n";
  };
  std::string text = row("phase", "ops", "written");
  for (const PhaseUse& use : report.phases) {
    text += row(phase_name(use.phase), std::to_string(use.count), bytes_text(use.bytes));
  }
  return text;
}

std::string memory_table(const GraphReport& report) {
  const auto row = [](const std::string& what, int64_t bytes) {
    return bytes == 0 ? "" : "  " + padded(what, 24) + padded(bytes_text(bytes), 12, true) + "\n";
  };
  return "  memory\n" + row("persistent", report.persistent_bytes) + row("constants", report.constant_bytes) +
         row("inputs", report.input_bytes) + row("arena", report.arena_bytes) +
         row("computed, at its peak", report.peak_bytes) +
         row("total", report.persistent_bytes + report.constant_bytes + report.input_bytes + report.arena_bytes +
                          report.peak_bytes);
}

std::string ops_table(const GraphReport& report) {
  const size_t num_shown = std::min(kShownOps, report.ops.size());
  size_t width = 28;
  for (size_t i = 0; i < num_shown; ++i) width = std::max(width, report.ops[i].first.size());
  const auto row = [&](const std::string& name, int64_t count) {
    return "  " + padded(name, width) + padded(std::to_string(count), 8, true) + "\n";
  };
  std::string text = row("ops", report.num_ops);
  int64_t others = report.num_ops;
  for (size_t i = 0; i < num_shown; ++i) {
    text += row(report.ops[i].first, report.ops[i].second);
    others -= report.ops[i].second;
  }
  return others == 0 ? text : text + row("others", others);
}

}  // namespace

int64_t GraphReport::collective_bytes() const {
  int64_t bytes = 0;
  for (const CollectiveUse& use : collectives) bytes += use.bytes;
  return bytes;
}

std::string GraphReport::to_string() const {
  const std::string communication = collectives.empty() ? "" : collectives_table(*this) + "\n";
  const bool knows_phases = std::any_of(phases.begin(), phases.end(), is_known);
  const std::string parts = knows_phases ? phases_table(*this) + "\n" : "";
  return communication + parts + memory_table(*this) + "\n" + ops_table(*this);
}

GraphReport report(const Graph& graph) {
  std::map<std::pair<std::string, std::string>, CollectiveUse> uses;
  std::map<std::string, int64_t> counts;
  for (const Node& node : graph.nodes()) {
    const std::string name = node.short_name();
    ++counts[name];
    if (!node.is_collective()) continue;
    CollectiveUse& use = uses[{name, node.group_name()}];
    ++use.count;
    use.bytes += collective_bytes(graph, node);
  }
  GraphReport result;
  result.num_ops = int64_t(graph.nodes().size());
  result.arena_bytes = graph.arena_bytes();
  for (auto& [key, use] : uses) result.collectives.push_back({key.first, key.second, use.count, use.bytes});
  std::stable_sort(result.collectives.begin(), result.collectives.end(),
                   [](const CollectiveUse& a, const CollectiveUse& b) { return a.bytes > b.bytes; });
  result.ops.assign(counts.begin(), counts.end());
  std::stable_sort(result.ops.begin(), result.ops.end(),
                   [](const auto& a, const auto& b) { return a.second > b.second; });
  const Memories memories(graph);
  result.input_bytes = memories.bytes_of(ValueKind::input);
  result.persistent_bytes = memories.bytes_of(ValueKind::persistent);
  result.constant_bytes = memories.bytes_of(ValueKind::constant);
  find_peak(graph, memories, result);
  result.phases = phases_of(graph);
  return result;
}

Phase reported_phase(const Node& node) {
  return node.is_collective() || node.is_wait() ? Phase::collective : node.phase;
}

int64_t written_bytes(const Graph& graph, const Node& node) {
  std::set<ValueId> written;
  for_each_written(node, [&](ValueId id) { written.insert(id); });
  std::set<int32_t> read;  // whose memory a view has
  for_each_operand(node, [&](ValueId id) { read.insert(graph.value(id).storage); });
  for_each_result(node, [&](ValueId id) {
    const int32_t storage = graph.value(id).storage;
    const bool is_seen = storage >= 0 ? read.count(storage) > 0 : is_view(node.op.schema());
    if (!is_seen && graph.value(id).kind != ValueKind::work) written.insert(id);
  });
  int64_t bytes = 0;
  for (ValueId id : written) bytes += graph.value(id).meta.num_bytes();
  return bytes;
}

std::vector<int64_t> live_bytes(const Graph& graph) {
  return live_bytes(graph, Memories(graph));
}

}  // namespace serried::graph
