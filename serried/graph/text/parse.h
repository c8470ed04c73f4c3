// Graphs from text.
#pragma once

#include <string_view>

#include "serried/graph/graph.h"

namespace serried::graph {

/// The graph that `to_text` wrote, without the data of its tensors. ValueError that names the line for anything else.
Graph parse_graph(std::string_view text);

/// The first line of every text.
inline constexpr std::string_view kFormat = "serried graph 2";
/// The last one, lest a truncated text pass for a short graph.
inline constexpr std::string_view kEnd = "end";

/// "computed"
std::string_view kind_name(ValueKind kind);

}  // namespace serried::graph
