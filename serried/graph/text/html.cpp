// The page of a graph: fixed parts, and between them the graph as JSON.
#include <nlohmann/json.hpp>

#include <map>
#include <set>
#include <string>

#include "serried/base/text.h"
#include "serried/graph/text/page.h"
#include "serried/graph/text/report.h"
#include "serried/graph/text/text.h"
#include "serried/graph/text/view.h"

namespace serried::graph {
namespace {

using nlohmann::json;
using serried::detail::escaped;

// What a value is for where no op uses it.
std::vector<const char*> roles_of(const Graph& graph) {
  std::vector<const char*> roles(graph.values().size(), "");
  for (const Gradient& gradient : graph.gradients()) {
    if (gradient.value != kNoValue) roles[size_t(gradient.value)] = "gradient of a parameter";
  }
  for (ValueId id : graph.outputs()) {
    if (id != kNoValue) roles[size_t(id)] = "result of the function";
  }
  return roles;
}

json values_json(const Graph& graph) {
  const std::vector<const char*> roles = roles_of(graph);
  json values = json::array();
  for (size_t id = 0; id < graph.values().size(); ++id) {
    const Value& value = graph.value(ValueId(id));
    const bool is_work = value.kind == ValueKind::work;
    values.push_back({{"name", value_text(graph, ValueId(id))},
                      {"kind", kind_name(value.kind)},
                      {"shape", is_work ? "" : value.meta.to_string()},
                      {"bytes", is_work ? 0 : value.meta.num_bytes()}});
    if (*roles[id] != 0) values.back()["role"] = roles[id];
  }
  return values;
}

// What it makes and what it writes, each once.
std::vector<ValueId> given_by(const Node& node) {
  std::vector<ValueId> given;
  std::set<ValueId> seen;
  const auto add = [&](ValueId id) {
    if (seen.insert(id).second) given.push_back(id);
  };
  for_each_result(node, add);
  for_each_written(node, add);
  return given;
}

json node_json(const Graph& graph, size_t i) {
  const Node& node = graph.nodes()[i];
  std::vector<ValueId> taken;
  for_each_operand(node, [&](ValueId id) { taken.push_back(id); });
  const Phase phase = reported_phase(node);
  json text = {{"op", node.short_name()},
               {"name", c10::toString(node.op.operator_name())},
               {"phase", phase_name(phase)},
               {"line", line_of(graph, i)},
               {"in", taken},
               {"out", given_by(node)},
               {"written", written_bytes(graph, node)}};
  if (phase != node.phase && node.phase != Phase::other) text["during"] = phase_name(node.phase);
  if (!node.is_collective()) return text;
  text["given"] = collective_bytes(graph, node);
  text["group"] = node.group_name();
  return text;
}

json nodes_json(const Graph& graph) {
  json nodes = json::array();
  std::map<ValueId, size_t> starts;  // of collectives, by what their wait is given
  for (size_t i = 0; i < graph.nodes().size(); ++i) {
    const Node& node = graph.nodes()[i];
    nodes.push_back(node_json(graph, i));
    if (node.is_collective()) for_each_result(node, [&](ValueId id) { starts[id] = i; });
    if (!node.is_wait()) continue;
    for_each_operand(node, [&](ValueId id) {
      const auto start = starts.find(id);
      if (start != starts.end()) nodes[start->second]["until"] = i;
    });
  }
  return nodes;
}

json phases_json(const GraphReport& report) {
  json phases = json::array();
  for (const PhaseUse& use : report.phases) {
    phases.push_back({{"phase", phase_name(use.phase)}, {"ops", use.count}, {"written", use.bytes}});
  }
  return phases;
}

json memory_json(const GraphReport& report) {
  return {{{"what", "persistent"}, {"bytes", report.persistent_bytes}},
          {{"what", "constants"}, {"bytes", report.constant_bytes}},
          {{"what", "inputs"}, {"bytes", report.input_bytes}},
          {{"what", "arena"}, {"bytes", report.arena_bytes}},
          {{"what", "computed, at its peak"}, {"bytes", report.peak_bytes}}};
}

// Names may come from a file of anybody's: they must not end the element that they stand in, nor be other than UTF-8.
std::string script_text(const json& data) {
  const std::string text = data.dump(-1, ' ', false, json::error_handler_t::replace);
  std::string safe;
  for (char c : text) safe += c == '<' ? "\\u003c" : std::string(1, c);
  return safe;
}

constexpr std::string_view kNoNetwork =
    "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; script-src "
    "'unsafe-inline'\">";

}  // namespace

std::string to_html(const Graph& graph) {
  const GraphReport costs = report(graph);
  const json data = {{"nodes", nodes_json(graph)},
                     {"values", values_json(graph)},
                     {"live", live_bytes(graph)},
                     {"peak", costs.peak_node},
                     {"phases", phases_json(costs)},
                     {"memory", memory_json(costs)},
                     {"collectives", graph.collectives().size()},
                     {"given", costs.collective_bytes()}};
  return c10::str("<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n", kNoNetwork,
                  "\n<meta name=\"viewport\" content=\"width=device-width\">\n<title>", graph.nodes().size(),
                  " ops</title>\n<style>", kPageStyle, "</style>\n</head>\n<body>\n", kPageHead,
                  escaped(costs.to_string()), kPageBody, "<script type=\"application/json\" id=\"graph\">",
                  script_text(data), "</script>\n<script>", kPageScript, "</script>\n</body>\n</html>\n");
}

}  // namespace serried::graph
