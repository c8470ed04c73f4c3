// Pictures of a graph.
#pragma once

#include <string>

#include "serried/graph/graph.h"

namespace serried::graph {

/// For Graphviz: a box per op, collectives coloured and with their bytes, edges with shapes; the line as tooltip.
///     std::ofstream("step.dot") << to_dot(step.graph());        // dot -Tsvg step.dot > step.svg
std::string to_dot(const Graph& graph);

/// One page for a browser, that loads nothing: the ops in order, coloured by phase, with bytes of what they write and
/// give, arcs for what they take from each other, collectives from their start to their wait, and memory; phases can be
/// hidden, and ops found by name, tensor, shape and group. Stays quick with tens of thousands of ops.
///     std::ofstream("step.html") << to_html(step.graph());
std::string to_html(const Graph& graph);

}  // namespace serried::graph
