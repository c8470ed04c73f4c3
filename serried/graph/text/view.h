// Pictures of a graph.
#pragma once

#include <string>

#include "serried/graph/graph.h"

namespace serried::graph {

/// For Graphviz: a box per op, collectives coloured and with their bytes, edges with shapes; the line as tooltip.
///     std::ofstream("step.dot") << to_dot(step.graph());        // dot -Tsvg step.dot > step.svg
std::string to_dot(const Graph& graph);

/// One page without anything else: the report, and the ops in order beside arcs for what they take from each other.
/// Hovering shows the line and where its operands come from and its results go.
std::string to_html(const Graph& graph);

}  // namespace serried::graph
