// Ranks compare the collectives of their graphs before one of them replays.
#pragma once

#include <cstdint>
#include <vector>

#include "serried/comm/group.h"
#include "serried/graph/graph.h"

namespace serried::graph {

/// Which recording this is; the same on all ranks that run the same program.
struct RecordedCall {
  int64_t function = 0;  // number of the captured function
  int64_t call = 0;      // number of its call
};

/// Returns once every other rank of each group that the graph uses has recorded the same collectives on it, in this
/// call or in an earlier or later one. CaptureError that names both ranks and the first difference where another rank
/// recorded others in the same call, or none within the timeout of the group. Goes through the groups' stores and runs
/// no collective, so ranks that replay need not take part.
void agree_on_collectives(const Graph& graph, const std::vector<Group>& groups, RecordedCall call);

}  // namespace serried::graph
