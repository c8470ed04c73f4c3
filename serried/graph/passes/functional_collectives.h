// Collectives of c10d, which start and are waited for, as one op of ours each.
#pragma once

#include <functional>

#include "serried/graph/graph.h"

namespace serried::graph {

/// Replaces starts and their waits by ops of ours, at the place of the start: what c10d writes in place stays in place,
/// and what it writes into memory made for that becomes a result. Where more than views lie between start and wait,
/// only what `may_be_apart(ours)` allows. Left alone: what has no such form, several tensors in one call, a timeout of
/// its own, a factor, tensors that are not dense on the CPU.
void join_starts_and_waits(Graph& graph, const std::function<bool(const Node& ours)>& may_be_apart);

}  // namespace serried::graph
