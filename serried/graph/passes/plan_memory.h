// Where the buffers of a graph lie in its arena.
#pragma once

#include "serried/graph/graph.h"

namespace serried::graph {

/// Puts a storage of `bytes` behind all others; returns its offset.
int64_t add_to_arena(Graph& graph, int64_t bytes);

/// Lays out buffers anew so that those which are never needed at the same time share memory.
void plan_buffers(Graph& graph);

/// For passes that change the order of nodes: buffers that were laid out for the old one are laid out again.
void plan_again(Graph& graph);

}  // namespace serried::graph
