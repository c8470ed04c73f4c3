// Graphs as text: refused with the line that is wrong, or read to a graph whose text is read again.
#include "tests/fuzz/target.h"

#include <c10/util/Exception.h>

#include <optional>

#include "serried/graph/text/serialize.h"

namespace serried::fuzz {

void run_graph_text(std::string_view bytes) {
  std::optional<graph::Graph> graph;
  if (!succeeds<c10::ValueError>([&] { graph = graph::parse_graph(bytes); })) return;
  const std::string text = graph::to_text(*graph);
  require(graph::to_text(graph::parse_graph(text)) == text, "a graph that does not come back from its text");
  graph->to_string();
  graph->escaping();
  for (const graph::Value& value : graph->values()) {
    value.meta.num_bytes();
    value.meta.storage_end();
  }
}

}  // namespace serried::fuzz
