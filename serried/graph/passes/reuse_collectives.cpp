// Drops collectives that would bring what an earlier one has brought.
#include <algorithm>
#include <array>
#include <map>
#include <string>
#include <string_view>
#include <unordered_map>

#include "serried/graph/passes/access.h"
#include "serried/graph/passes/collectives.h"
#include "serried/graph/passes/names.h"
#include "serried/graph/passes/passes.h"
#include "serried/graph/text/text.h"

namespace serried::passes {
namespace {

using namespace serried::graph;

template <size_t n>
bool is_op(const Node& node, const std::array<std::string_view, n>& names) {
  return std::find(names.begin(), names.end(), node.op.operator_name().name) != names.end();
}

bool brings_result(const Node& node) {
  static constexpr std::array<std::string_view, 5> kOps = {"serried::all_gather", "serried::all_reduce",
                                                           "serried::all_to_all", "serried::broadcast",
                                                           "serried::reduce_scatter"};
  return is_op(node, kOps) && !is_premultiplied(node);
}

// What is contiguous on one rank may be copied on another, and both have to decide alike.
bool copies(const Node& node) {
  static constexpr std::array<std::string_view, 2> kOps = {"aten::_to_copy", "aten::clone"};
  return is_op(node, kOps);
}

bool is_operand(const Node& node, ValueId value) {
  bool found = false;
  for_each_operand(node, [&](ValueId id) { found |= id == value; });
  return found;
}

// Which values have the same data, as far as it is cheap to see.
class SameData {
 public:
  explicit SameData(const Graph& graph)
      : graph_(graph),
        firsts_(graph.values().size()),
        changes_then_(graph.values().size()),
        changes_(size_t(new_storage(graph))) {
    for (size_t id = 0; id < firsts_.size(); ++id) firsts_[id] = ValueId(id);
  }

  /// For each node in turn. The earlier result with the data of this node's only one, or kNoValue.
  ValueId find(const Node& node, const Access& access) {
    const bool can_tell = brings_result(node) || copies(node) || is_alias(graph_, node);
    const std::string call = can_tell ? call_text(node) : "";
    if (access.is_barrier) std::for_each(changes_.begin(), changes_.end(), [](int64_t& changes) { ++changes; });
    for (int32_t storage : access.writes) ++changes_[size_t(storage)];
    // add_() and its kin give back what they were given: no new value, but one that was written.
    for_each_result(node, [&](ValueId id) {
      if (!is_operand(node, id)) changes_then_[size_t(id)] = changes_of(id);
    });
    if (!can_tell || node.results.size() != 1 || node.results[0].size() != 1) return kNoValue;
    const ValueId result = node.results[0][0];
    if (result == kNoValue) return kNoValue;
    firsts_[size_t(result)] = known_.emplace(call, result).first->second;
    return firsts_[size_t(result)] != result ? firsts_[size_t(result)] : kNoValue;
  }

 private:
  int64_t changes_of(ValueId id) const {
    const int32_t storage = graph_.value(id).storage;
    return storage < 0 ? 0 : changes_[size_t(storage)];
  }

  // Equal texts: equal data. What was written since it was made has data of its own.
  std::string data_text(ValueId id) const {
    if (id == kNoValue) return "undefined";
    if (changes_of(id) == changes_then_[size_t(id)]) return std::to_string(firsts_[size_t(id)]);
    return c10::str(id, " after ", changes_of(id));
  }

  std::string call_text(const Node& node) const {
    std::string text = c10::toString(node.op.operator_name());
    for (const Argument& argument : node.arguments) {
      text += argument.ids.empty() ? ", " + constant_text(argument.constant) : "";
      for (ValueId id : argument.ids) text += ", %" + data_text(id);
    }
    return text;
  }

  const Graph& graph_;
  std::vector<ValueId> firsts_;        // the first value with the data that the value had when it was made
  std::vector<int64_t> changes_then_;  // of its storage, when the value was made
  std::vector<int64_t> changes_;       // per storage, until now
  std::unordered_map<std::string, ValueId> known_;
};

class Reusing {
 public:
  explicit Reusing(Graph& graph)
      : graph_(graph), accesses_(accesses_of(graph)), storages_(graph), names_(graph), num_writers_(storage_count()) {
    for (size_t i = 0; i < accesses_.size(); ++i) {
      for (int32_t storage : accesses_[i].writes) ++num_writers_[size_t(storage)];
      if (accesses_[i].is_barrier) for_each_operand(graph.nodes()[i], [&](ValueId id) { note_writer(id); });
    }
  }

  void run() {
    SameData same(graph_);
    std::vector<bool> is_dropped;
    for (size_t i = 0; i < accesses_.size(); ++i) {
      const Node& node = graph_.nodes()[i];
      const ValueId earlier = same.find(node, accesses_[i]);
      is_dropped.push_back(earlier != kNoValue && brings_result(node) && join(earlier, node.results[0][0]));
    }
    size_t next = 0;
    std::erase_if(graph_.nodes(), [&](const Node&) { return is_dropped[next++]; });
    names_.apply(graph_);
    for (Value& value : graph_.values()) {
      const auto moved = moved_.find(value.storage);
      if (moved != moved_.end()) value.storage = moved->second;
    }
  }

 private:
  size_t storage_count() const { return size_t(new_storage(graph_)); }

  void note_writer(ValueId id) {
    const int32_t storage = graph_.value(id).storage;
    if (storage >= 0) ++num_writers_[size_t(storage)];
  }

  // Nobody but its collective writes it, so nobody can tell it from another result with the same data.
  bool is_fixed(ValueId id) const {
    const Value& value = graph_.value(id);
    return value.kind == ValueKind::computed && value.storage >= 0 && num_writers_[size_t(value.storage)] == 1 &&
           !storages_.changes_layout(id);
  }

  bool join(ValueId earlier, ValueId later) {
    if (!is_fixed(earlier) || !is_fixed(later)) return false;
    if (!(graph_.value(earlier).meta == graph_.value(later).meta)) return false;
    const ValueId kept = names_.of(earlier);
    const bool later_escapes = storages_.escapes(later);
    // Two tensors that somebody sees after the run stay two.
    if (later_escapes && storages_.escapes(kept)) return false;
    later_escapes ? names_.call(kept, later) : names_.call(later, kept);
    moved_[graph_.value(later).storage] = graph_.value(earlier).storage;
    return true;
  }

  Graph& graph_;
  const std::vector<Access> accesses_;
  const Storages storages_;
  Names names_;
  std::vector<int64_t> num_writers_;  // per storage, those that make it included
  std::map<int32_t, int32_t> moved_;  // storages of dropped results, and where their values are now
};

}  // namespace

Pass reuse_collectives() {
  return {"reuse_collectives", [](Graph& graph) { Reusing(graph).run(); }};
}

}  // namespace serried::passes
