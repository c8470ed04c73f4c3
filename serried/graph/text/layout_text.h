// How a DTensor lies on its mesh, as text for files.
#pragma once

#include <string>

#include "serried/graph/dtensor_layout.h"
#include "serried/graph/text/cursor.h"

namespace serried::graph {

///     "S0 R" of [7, 5] on [2, 2] names ["dp", "tp"] ranks [0, 1, 2, 3] group "threads/1"
std::string layout_text(const DTensorLayout& layout);
/// What `layout_text` wrote; fails at `in` where it does not agree with itself.
DTensorLayout read_layout(Cursor& in);

}  // namespace serried::graph
