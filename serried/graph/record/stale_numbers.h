// Numbers that a graph holds still though the program may mean them to change: said once, when it is made.
#pragma once

#include "serried/graph/record/recorder.h"

namespace serried::graph {

/// Of tensors that the function reads on the host.
void warn_of_stale_numbers(const Recording& recording);

/// Of an optimizer that steps by a constant.
void warn_of_constant_rate(const Graph& graph);

}  // namespace serried::graph
