// How tensors lie in memory and DTensors on their mesh: as text for files, and whether that can be at all.
#pragma once

#include <string>

#include "serried/graph/dtensor_layout.h"
#include "serried/graph/graph.h"
#include "serried/graph/text/literal.h"

namespace serried::graph {

///     "S0 R" of [7, 5] on [2, 2] names ["dp", "tp"] ranks [0, 1, 2, 3] group "threads/1"
std::string layout_text(const DTensorLayout& layout);
/// What `layout_text` wrote; fails at `in` where it does not agree with itself.
DTensorLayout read_layout(Cursor& in);

/// Whether a tensor can have this shape: no size is below 0, and 63 bits count its elements, `each` bytes apiece.
bool is_possible_shape(c10::IntArrayRef sizes, int64_t each = 1);

/// Whether a tensor can be so: also its strides and offset reach no byte that 63 bits cannot count. Sparse ones have no
/// strides.
bool is_possible(const TensorMeta& meta);

}  // namespace serried::graph
