// Other names of values, for passes that find two to be one.
#pragma once

#include <vector>

#include "serried/graph/graph.h"

namespace serried::graph {

class Names {
 public:
  explicit Names(const Graph& graph) : names_(graph.values().size()) {
    for (size_t id = 0; id < names_.size(); ++id) names_[id] = ValueId(id);
  }

  ValueId of(ValueId id) const {
    while (id != kNoValue && names_[size_t(id)] != id) id = names_[size_t(id)];
    return id;
  }
  void call(ValueId id, ValueId by) { names_[size_t(id)] = by; }

  /// Everywhere in the nodes.
  void apply(Graph& graph) const {
    for (Node& node : graph.nodes()) {
      for (Argument& argument : node.arguments) apply(argument.ids);
      for (auto& ids : node.results) apply(ids);
    }
  }

 private:
  void apply(std::vector<ValueId>& ids) const {
    for (ValueId& id : ids) id = of(id);
  }

  std::vector<ValueId> names_;
};

}  // namespace serried::graph
