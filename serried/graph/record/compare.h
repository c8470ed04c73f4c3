// Trusts a function after two recordings: what stayed the same may be replayed, what changed is refused. Also whose
// memory inputs have: their own, each other's, or that of what the function found by itself.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "serried/graph/record/recorder.h"

namespace serried::graph {

/// Where two recordings ran different ops; empty where they did not.
std::string first_difference(const Recording& first, const Recording& second);

/// Makes `second`, which ran the same ops, replayable: external values become persistent or constant. CaptureError for
/// a scalar that changed between the two, and for a tensor made without an op that did.
void make_replayable(const Recording& first, Recording& second);

/// Whether a value is a tensor that the function found by itself.
bool is_from_outside(const Value& value);

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
