// What passes on collectives share: what one is, and how a start and its wait become one.
#pragma once

#include <functional>
#include <string>

#include "serried/graph/graph.h"
#include "serried/graph/text/custom_class.h"

namespace serried::graph {

/// A functional or in-place collective of ours whose pieces are equal and lie side by side: one that can be joined with
/// others like it, or started without waiting.
struct SimpleCollective {
  enum class Kind : uint8_t { none, all_reduce, all_reduce_in_place, all_gather, reduce_scatter };
  Kind kind = Kind::none;  // none: any other node
  ValueId operand = kNoValue;
  ValueId result = kNoValue;  // the operand, in place
  int64_t num_ranks = 0;      // of gathers and scatters
  int64_t bytes = 0;          // the larger of operand and result
  std::string likeness = "";  // same text: same kind, group, reduction, dtype and device

  explicit operator bool() const { return kind != Kind::none; }
};

/// The constant that the node is given for the argument `name`; None where it has no such argument.
const c10::IValue& constant_named(const Node& node, const std::string& name);

/// How it reduces; null where it does not.
const c10d::ReduceOp* reduction_of(const Node& node);
/// Whether it multiplies by a factor first, which may be a tensor that changes.
bool is_premultiplied(const Node& node);

/// Whether pieces are cut along dim 0 and, where their sizes are told, equal: how they lie in memory, and travel.
bool has_pieces_in_a_row(const Node& node);

SimpleCollective simple_collective(const Graph& graph, const Node& node);

/// Replaces starts and their waits by ops of ours, at the place of the start: what is written in place stays in place,
/// and what c10d writes into memory made for that becomes a result. Where more than views lie between start and wait,
/// only what `may_be_apart(ours)` allows. Left alone: what has no such form, several tensors in one call, a timeout of
/// its own, a factor, tensors that are not dense on the CPU.
void join_starts_and_waits(Graph& graph, const std::function<bool(const Node& ours)>& may_be_apart);

}  // namespace serried::graph
