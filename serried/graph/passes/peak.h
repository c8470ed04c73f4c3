// How much memory a run needs at most, and how much of it may be memory that stays.
#pragma once

#include <vector>

#include "serried/graph/graph.h"

namespace serried::graph {

/// Memory that stays is held during the whole run, also when others need theirs. Per node of `candidates` whether its
/// results may stay without the run needing more than `max_peak` times what one needs that frees everything after its
/// last use, as eager does. Small results are preferred: they cost most time per byte to allocate.
std::vector<bool> fits_in_peak(const Graph& graph, const std::vector<size_t>& candidates, double max_peak);

}  // namespace serried::graph
