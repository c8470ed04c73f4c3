// Draws a graph as DOT and as HTML.
#include "serried/graph/text/view.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <sstream>

#include "serried/base/text.h"
#include "serried/graph/text/literal.h"
#include "serried/graph/text/report.h"
#include "serried/graph/text/text.h"

namespace serried::graph {
namespace {

using serried::detail::bytes_text;
using serried::detail::escaped;

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

constexpr const char* kPageStyle = R"(
body { font: 13px ui-monospace, monospace; margin: 24px; color: #222; background: #fff; }
pre { line-height: 1.4; }
main { display: flex; }
svg { flex: none; }
path { fill: none; stroke: #bbb; }
path.on { stroke: #d00; stroke-width: 2; }
ol { margin: 0; padding: 0; list-style: none; }
li { height: 20px; line-height: 20px; white-space: nowrap; padding: 0 8px; }
li:hover, li.on { background: #fff3c4; }
.op { display: inline-block; min-width: 200px; padding: 0 6px; border-radius: 3px; }
.shape { color: #666; }
)";

constexpr const char* kPageScript = R"(
const rows = [...document.querySelectorAll('li')], arcs = [...document.querySelectorAll('path')];
rows.forEach((row, i) => {
  const mark = on => {
    for (const arc of arcs) {
      const ends = [+arc.dataset.from, +arc.dataset.to];
      if (!ends.includes(i)) continue;
      arc.classList.toggle('on', on);
      for (const end of ends) rows[end].classList.toggle('on', on);
    }
  };
  row.addEventListener('mouseenter', () => mark(true));
  row.addEventListener('mouseleave', () => mark(false));
});
)";

constexpr int kRowHeight = 20;
constexpr int kArcWidth = 220;

void write_arc(std::ostream& out, const Edge& edge) {
  const size_t y1 = edge.from * kRowHeight + kRowHeight / 2, y2 = edge.to * kRowHeight + kRowHeight / 2;
  // Longer ones bend further out, all within the picture.
  const int bend = kArcWidth - std::min(kArcWidth, int(24 * std::sqrt(double(edge.to - edge.from))));
  out << "<path data-from=\"" << edge.from << "\" data-to=\"" << edge.to << "\" d=\"M" << kArcWidth << "," << y1 << " C"
      << bend << "," << y1 << " " << bend << "," << y2 << " " << kArcWidth << "," << y2 << "\"/>\n";
}

void write_op_row(std::ostream& out, const Graph& graph, size_t i) {
  const Node& node = graph.nodes()[i];
  const char* colour = colour_of(node);
  out << "<li title=\"" << escaped(line_of(graph, i)) << "\"><span class=\"op\"";
  if (colour != nullptr) out << " style=\"background: " << colour << "\"";
  out << ">" << escaped(node.short_name()) << "</span> <span class=\"shape\">";
  std::string shapes;
  for_each_result(node, [&](ValueId id) {
    if (graph.value(id).kind == ValueKind::work) return;
    shapes += (shapes.empty() ? "" : ", ") + graph.value(id).meta.to_string();
  });
  out << shapes << "</span> " << escaped(cost_text(graph, node)) << "</li>\n";
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

std::string to_html(const Graph& graph) {
  const size_t num_nodes = graph.nodes().size();
  std::ostringstream out;
  out << "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<title>" << num_nodes
      << " ops</title>\n<style>" << kPageStyle << "</style>\n</head>\n<body>\n<pre>"
      << escaped(report(graph).to_string()) << "</pre>\n<main>\n<svg width=\"" << kArcWidth << "\" height=\""
      << num_nodes * kRowHeight << "\">\n";
  for (const Edge& edge : edges_of(graph)) {
    if (edge.from != kOutside) write_arc(out, edge);
  }
  out << "</svg>\n<ol>\n";
  for (size_t i = 0; i < num_nodes; ++i) write_op_row(out, graph, i);
  out << "</ol>\n</main>\n<script>" << kPageScript << "</script>\n</body>\n</html>\n";
  return out.str();
}

}  // namespace serried::graph
