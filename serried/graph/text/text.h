// Graphs as text.
#pragma once

#include <string>
#include <string_view>

#include "serried/graph/graph.h"

namespace serried::graph {

enum class LineStyle : uint8_t {
  readable,  // short names, what is as by default left out, shapes and bytes behind
  complete,  // all there is to know, for files
};

/// Line `i` of a graph; readable as to_string prints it.
///     %7 = all_reduce(%5, group="dp", op=sum)  # f32[4, 3], 48 B
std::string line_of(const Graph& graph, size_t i, LineStyle style = LineStyle::readable);

/// A constant argument as text; numbers to the last bit.
std::string constant_text(const c10::IValue& constant);

/// "%12", "%p3" for persistent values, "%c4" for constants, "%in0" for inputs, "%x" for a value named x; "undefined".
std::string value_text(const Graph& graph, ValueId id);

/// Bytes that this rank gives to a collective; those that it gets, for recv.
int64_t collective_bytes(const Graph& graph, const Node& node);

/// The first line of a graph in full.
inline constexpr std::string_view kFormat = "serried graph 2";
/// Its last one, lest a truncated text pass for a short graph.
inline constexpr std::string_view kEnd = "end";

/// "computed"
std::string_view kind_name(ValueKind kind);

}  // namespace serried::graph
