// Draws a graph as DOT.
#include "serried/graph/text/view.h"

#include <map>
#include <sstream>

#include "serried/base/text.h"
#include "serried/graph/text/literal.h"
#include "serried/graph/text/text.h"

namespace serried::graph {
namespace {

using serried::detail::bytes_text;

constexpr size_t kOutside = size_t(-1);

// From the last node that wrote a value to one that uses it.
struct Edge {
  size_t from;  // kOutside: the value was there before
  size_t to;
  ValueId value;
};

std::vector<Edge> edges_of(const Graph& graph) {
  std::map<ValueId, size_t> writer;
  std::vector<Edge> edges;
  for (size_t i = 0; i < graph.nodes().size(); ++i) {
    const Node& node = graph.nodes()[i];
    for_each_operand(node, [&](ValueId id) {
      const auto found = writer.find(id);
      edges.push_back({found == writer.end() ? kOutside : found->second, i, id});
    });
    for_each_result(node, [&](ValueId id) { writer[id] = i; });
    for (size_t k = 0; k < node.arguments.size(); ++k) {
      if (!is_written(node.op.schema(), k)) continue;
      for (ValueId id : node.arguments[k].ids) writer[id] = i;
    }
  }
  return edges;
}

// A hue per kind of collective.
const char* colour_of(const Node& node) {
  static constexpr std::pair<std::string_view, const char*> kColours[] = {
      {"all_reduce", "#f4a261"}, {"all_gather", "#7cb5ec"}, {"reduce_scatter", "#90d18b"},
      {"all_to_all", "#e58fb1"}, {"broadcast", "#c3a6e6"},  {"send", "#e9d46b"},
      {"recv", "#e9d46b"}};
  if (!node.is_collective()) return nullptr;
  const std::string name = node.short_name();
  for (const auto& [kind, colour] : kColours) {
    if (name == kind) return colour;
  }
  return "#d0d0d0";
}

std::string cost_text(const Graph& graph, const Node& node) {
  if (!node.is_collective()) return "";
  return bytes_text(collective_bytes(graph, node)) + " over \"" + node.group_name() + "\"";
}

bool starts_outside(const Graph& graph, ValueId id) {
  const ValueKind kind = graph.value(id).kind;
  return kind != ValueKind::computed && kind != ValueKind::work;
}

void write_dot_node(std::ostream& out, const Graph& graph, size_t i) {
  const Node& node = graph.nodes()[i];
  const std::string cost = cost_text(graph, node);
  const char* colour = colour_of(node);
  // The line break is DOT's own escape: it must not be quoted again.
  std::string label = quoted_text(node.short_name());
  if (!cost.empty()) label = label.substr(0, label.size() - 1) + "\\n" + quoted_text(cost).substr(1);
  out << "  n" << i << " [label=" << label << ", tooltip=" << quoted_text(line_of(graph, i));
  if (colour != nullptr) out << ", style=filled, fillcolor=\"" << colour << "\"";
  out << "];\n";
}

}  // namespace

std::string to_dot(const Graph& graph) {
  std::ostringstream out;
  out << "digraph step {\n  node [shape=box, fontname=monospace];\n  edge [fontname=monospace, fontsize=9];\n";
  for (size_t id = 0; id < graph.values().size(); ++id) {
    if (!starts_outside(graph, ValueId(id))) continue;
    const std::string label = value_text(graph, ValueId(id)) + ": " + graph.value(ValueId(id)).meta.to_string();
    out << "  v" << id << " [shape=oval, label=" << quoted_text(label) << "];\n";
  }
  for (size_t i = 0; i < graph.nodes().size(); ++i) write_dot_node(out, graph, i);
  for (const Edge& edge : edges_of(graph)) {
    if (edge.from == kOutside) {
      out << "  v" << edge.value << " -> n" << edge.to << ";\n";
    } else {
      out << "  n" << edge.from << " -> n" << edge.to
          << " [label=" << quoted_text(graph.value(edge.value).meta.to_string()) << "];\n";
    }
  }
  out << "}\n";
  return out.str();
}

}  // namespace serried::graph
