// Rewrites of a captured graph, each a value with a name: list them, leave some out, write your own.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "serried/graph/graph.h"

namespace serried {

/// Changes how a graph runs, not what it computes.
struct Pass {
  std::string name;
  std::function<void(graph::Graph&)> run;
};

namespace passes {

/// Collectives of c10d that are waited for at once become ours, so that other passes know them: all_reduce and
/// broadcast in place; gathers, scatters and exchanges with a result, where their output was made for them. Those that
/// run beside other work stay as they are, and so do several tensors in one call, timeouts, reduce, gather, scatter,
/// send, recv.
Pass functional_collectives();

/// Nodes whose results nobody needs go, unless they write, communicate or draw random numbers; detach() and other
/// second names of a tensor go too.
Pass drop_dead();

/// Views of parameters, constants and buffers are made once.
Pass hoist_views();

/// The same in-place op on many tensors becomes one _foreach_ op.
Pass fuse_foreach();

/// Ops write into fixed buffers where they have an out= form. Outputs and gradients stay new tensors at each run. Small
/// results come first, and as many as keep the memory of a run within `max_peak` of what eager needs: more is faster.
Pass freeze(double max_peak = 1.0);

/// Buffers that are never needed at the same time share memory.
Pass plan_memory();

/// Collectives of the same data run once: a Partial that several ops need is reduced for the first. Two results that
/// the caller gets, or that somebody writes, stay two.
Pass reuse_collectives();

/// Collectives of one kind, group, reduction and dtype that follow each other become one over at most `megabytes`
/// (MiB), as long as nothing between them needs a result. All ranks have to run it with the same limit.
///     auto step = capture(fn, {.passes = {passes::drop_dead(), passes::bucket_collectives(), passes::overlap()}});
Pass bucket_collectives(double megabytes = 25);

/// Collectives start as soon as their operands are there and are waited for where their results are needed, those of
/// c10d too, whenever they were waited for. Starts keep their order. At most `max_bytes_in_flight` are on their way,
/// but always one collective.
Pass overlap(int64_t max_bytes_in_flight = int64_t(256) << 20);

/// What `capture` runs unless told otherwise: all of the above but those that change the order of collectives.
inline std::vector<Pass> defaults() {
  // Buffers exist after freeze, and views of them are hoisted too.
  return {functional_collectives(), drop_dead(), fuse_foreach(), freeze(), hoist_views(), plan_memory()};
}

/// "12 buffers: 1.250 MiB planned, 3.000 MiB without reuse".
std::string memory_report(const graph::Graph& graph);

}  // namespace passes
}  // namespace serried
