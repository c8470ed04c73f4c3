// Writes collectives of c10d that are waited for at once as ours, so that other passes know them.
#include "serried/graph/passes/pairs.h"
#include "serried/graph/passes/passes.h"

namespace serried::passes {

Pass functional_collectives() {
  // What runs beside other work goes on doing so.
  const auto never = [](const graph::Node&) { return false; };
  return {"functional_collectives", [never](graph::Graph& graph) { graph::fold_pairs(graph, never); }};
}

}  // namespace serried::passes
