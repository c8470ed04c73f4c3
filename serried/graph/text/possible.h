// What can be at all: checks of tensors and constants that come from text.
#pragma once

#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>

#include "serried/graph/graph.h"

namespace serried::graph {

/// Whether a tensor can have this shape: no size is below 0, and 63 bits count its elements, `each` bytes apiece.
bool is_possible_shape(c10::IntArrayRef sizes, int64_t each = 1);

/// Whether a tensor can be so: also its strides and offset reach no byte that 63 bits cannot count. Sparse ones have no
/// strides.
bool is_possible(const TensorMeta& meta);

/// Whether an argument that is declared as `type` can be `constant`.
bool can_be(const c10::TypePtr& type, const c10::IValue& constant);

}  // namespace serried::graph
