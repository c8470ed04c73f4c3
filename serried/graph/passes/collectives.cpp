// Tells simple collectives from others.
#include "serried/graph/passes/collectives.h"

#include <algorithm>

#include "serried/graph/passes/access.h"
#include "serried/graph/text/text.h"

namespace serried::graph {
namespace {

using Kind = SimpleCollective::Kind;

Kind simple_kind(const Node& node) {
  const std::string& name = node.op.operator_name().name;
  if (name == "serried::all_reduce") return Kind::all_reduce;
  if (name == "serried::all_reduce_") return Kind::all_reduce_in_place;
  if (name == "serried::all_gather") return Kind::all_gather;
  if (name == "serried::reduce_scatter") return Kind::reduce_scatter;
  return Kind::none;
}

bool is_strided(const TensorMeta& meta) {
  return meta.strides.size() == meta.sizes.size() && !c10::isComplexType(meta.dtype) && meta.dtype != at::kBool;
}

}  // namespace

const c10::IValue& constant_named(const Node& node, const std::string& name) {
  static const c10::IValue nothing;
  for (size_t i = 0; i < node.arguments.size(); ++i) {
    if (node.op.schema().arguments()[i].name() == name) return node.arguments[i].constant;
  }
  return nothing;
}

const c10d::ReduceOp* reduction_of(const Node& node) {
  const c10d::ReduceOp* op = reduce_op_of(constant_named(node, "op"));
  return op != nullptr ? op : reduce_op_of(constant_named(node, "reduce_op"));
}

bool is_premultiplied(const Node& node) {
  const c10d::ReduceOp* op = reduction_of(node);
  return op != nullptr && op->op_ == c10d::ReduceOp::PREMUL_SUM;
}

bool has_pieces_in_a_row(const Node& node) {
  for (const char* name : {"dim", "split_dim", "concat_dim"}) {
    const c10::IValue& dim = constant_named(node, name);
    if (!dim.isNone() && dim.toInt() != 0) return false;
  }
  const c10::IValue& sizes = constant_named(node, "sizes");
  if (sizes.isNone()) return true;
  const std::vector<int64_t> each = sizes.toIntVector();
  return !each.empty() && std::all_of(each.begin(), each.end(), [&](int64_t size) { return size == each[0]; });
}

SimpleCollective simple_collective(const Graph& graph, const Node& node) {
  const Kind kind = simple_kind(node);
  const bool has_pieces = kind == Kind::all_gather || kind == Kind::reduce_scatter;
  if (kind == Kind::none || (has_pieces && !has_pieces_in_a_row(node))) return {};
  if (is_premultiplied(node) || !constant_named(node, "timeout_ms").isNone()) return {};
  SimpleCollective found{.kind = kind, .operand = node.arguments[0].ids[0]};
  found.result = kind == Kind::all_reduce_in_place ? found.operand : node.results.at(0).at(0);
  if (found.operand == kNoValue || found.result == kNoValue) return {};
  const TensorMeta &in = graph.value(found.operand).meta, &out = graph.value(found.result).meta;
  if (!is_strided(in) || !is_strided(out) || (has_pieces && in.sizes.empty())) return {};
  if (kind != Kind::all_reduce_in_place && !(is_contiguous(out) && out.offset == 0)) return {};
  if (has_pieces) found.num_ranks = int64_t(constant_named(node, "sizes").toListRef().size());
  found.bytes = std::max(in.num_bytes(), out.num_bytes());
  found.likeness = c10::str(node.op.operator_name().name, " ", node.group_name(), " ",
                            constant_text(constant_named(node, "op")), " ", in.dtype, " ", in.device);
  return found;
}

}  // namespace serried::graph
