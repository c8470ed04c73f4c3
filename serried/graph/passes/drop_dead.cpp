// Drops nodes that nobody needs, and second names for the same memory.
#include <algorithm>
#include <array>
#include <string_view>

#include "serried/graph/passes/access.h"
#include "serried/graph/passes/names.h"
#include "serried/graph/passes/passes.h"

namespace serried::passes {
namespace {

using namespace serried::graph;

// Not those that change how memory reads, as _conj and _neg_view do.
bool keeps_data(const Node& node) {
  static constexpr std::array<std::string_view, 14> kNames = {
      "_reshape_alias", "_unsafe_view", "alias",   "as_strided", "detach",    "expand",    "lift_fresh",
      "permute",        "slice",        "squeeze", "t",          "transpose", "unsqueeze", "view"};
  return std::find(kNames.begin(), kNames.end(), node.short_name()) != kNames.end();
}

// Finds values that are one tensor: nobody can tell which of them an op is given.
class SecondNames {
 public:
  explicit SecondNames(const Graph& graph)
      : graph_(graph), storages_(graph), escapes_(graph.escaping()), names_(graph), bases_(escapes_.size(), kNoValue) {}

  /// Whether the node does nothing but give a second name.
  bool fold(const Node& node) {
    fold_written(node);
    if (!keeps_data(node) || !is_alias(graph_, node)) return false;
    if (node.results.size() != 1 || node.results[0].size() != 1 || node.results[0][0] == kNoValue) return false;
    const ValueId base = node.arguments[0].ids[0], result = node.results[0][0];
    if (storages_.changes_layout(base) || is_at_fixed_place_of_input(node)) return false;
    bases_[size_t(result)] = base;
    // A view back is as good as none: t(t(x)).
    for (ValueId same = base; same != kNoValue; same = bases_[size_t(same)]) {
      if (graph_.value(same).meta == graph_.value(result).meta) return join(names_.of(same), result);
    }
    return false;
  }

  const Names& names() const { return names_; }

 private:
  // The next argument may lie elsewhere in its storage, as_strided counts from the begin.
  bool is_at_fixed_place_of_input(const Node& node) const {
    if (node.short_name() != "as_strided") return false;
    const int32_t storage = graph_.value(node.arguments[0].ids[0]).storage;
    return std::any_of(graph_.inputs().begin(), graph_.inputs().end(),
                       [&](ValueId id) { return id != kNoValue && graph_.value(id).storage == storage; });
  }

  // What an in-place op returns is what it was given.
  void fold_written(const Node& node) {
    const c10::FunctionSchema& schema = node.op.schema();
    for (size_t r = 0; r < node.results.size(); ++r) {
      const c10::AliasInfo* returned = schema.returns()[r].alias_info();
      if (returned == nullptr || !returned->isWrite() || node.results[r].size() != 1) continue;
      for (size_t k = 0; k < node.arguments.size(); ++k) {
        if (!is_written(schema, k) || !(*schema.arguments()[k].alias_info() == *returned)) continue;
        const ValueId given = node.arguments[k].ids.at(0), result = node.results[r][0];
        if (given != kNoValue && result != kNoValue && given != result && !escapes_[size_t(result)]) {
          names_.call(result, names_.of(given));
        }
      }
    }
  }

  bool join(ValueId base, ValueId result) {
    if (!escapes_[size_t(result)]) {
      names_.call(result, base);
      return true;
    }
    // A result of the function keeps its name, and is no alias of another result or of an argument.
    if (escapes_[size_t(base)] || graph_.value(base).kind != ValueKind::computed) return false;
    names_.call(base, result);
    return true;
  }

  const Graph& graph_;
  Storages storages_;
  std::vector<bool> escapes_;
  Names names_;
  std::vector<ValueId> bases_;  // of views
};

void fold_second_names(Graph& graph) {
  SecondNames second(graph);
  std::erase_if(graph.nodes(), [&](const Node& node) { return second.fold(node); });
  second.names().apply(graph);
}

void drop_unneeded(Graph& graph) {
  std::vector<bool> is_needed = graph.escaping();
  std::vector<Node>& nodes = graph.nodes();
  std::vector<bool> is_dead(nodes.size());
  for (size_t i = nodes.size(); i-- > 0;) {
    bool needed = has_effects(nodes[i]);
    for_each_result(nodes[i], [&](ValueId id) { needed |= is_needed[id]; });
    is_dead[i] = !needed;
    if (needed) for_each_operand(nodes[i], [&](ValueId id) { is_needed[id] = true; });
  }
  size_t next = 0;
  std::erase_if(nodes, [&](const Node&) { return is_dead[next++]; });
}

}  // namespace

Pass drop_dead() {
  return {"drop_dead", [](Graph& graph) {
            fold_second_names(graph);
            drop_unneeded(graph);
          }};
}

}  // namespace serried::passes
