// Collectives that start and are waited for, ours and those of c10d, as one op of ours each.
#pragma once

#include <functional>

#include "serried/graph/graph.h"

namespace serried::graph {

/// Replaces starts and their waits by ops of ours, at the place of the start: what is written in place stays in place,
/// and what c10d writes into memory made for that becomes a result. Where more than views lie between start and wait,
/// only what `may_be_apart(ours)` allows. Left alone: what has no such form, several tensors in one call, a timeout of
/// its own, a factor, tensors that are not dense on the CPU.
void join_starts_and_waits(Graph& graph, const std::function<bool(const Node& ours)>& may_be_apart);

}  // namespace serried::graph
