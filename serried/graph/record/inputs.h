// Whose memory inputs have: their own, each other's, or that of what the function found by itself.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "serried/graph/record/recorder.h"

namespace serried::graph {

/// Whether a value is a tensor that the function found by itself.
bool is_from_outside(const Value& value);

/// Notes in `second.inputs` what differed between two recordings that agree. A function that finds one of its arguments
/// by itself too looks as if it used the argument twice: so an input counts as one that may change only if it did.
void compare_inputs(const Recording& first, Recording& second);

/// Whether an input of one recording lies in memory that the function found by itself in the other: they need not run
/// the same ops.
bool shares_otherwise(const Recording& a, const Recording& b);

/// Whether `inputs` lie in no memory that the function found by itself in `recording`.
bool is_apart(const Recording& recording, const std::vector<at::Tensor>& inputs);

/// Whether `arguments` lie in the memory that those of `recording` had.
bool has_memory_of_inputs(const Recording& recording, const std::vector<at::Tensor>& arguments);

/// Whether what the function found by itself is where it was.
bool is_in_place(const Recording& recording);

}  // namespace serried::graph
