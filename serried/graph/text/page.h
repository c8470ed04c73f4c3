// The fixed parts of the page that shows a graph, in the order in which html.cpp puts the rest between them.
#pragma once

#include <string_view>

namespace serried::graph {

extern const std::string_view kPageStyle;   // CSS
extern const std::string_view kPageHead;    // ends where the report as text begins
extern const std::string_view kPageBody;    // from there on
extern const std::string_view kPageScript;  // fills the page by what stands in #graph

}  // namespace serried::graph
