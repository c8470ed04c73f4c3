// Finds starts and their waits, and the one op of ours that stands for both.
#include "serried/graph/passes/collectives.h"

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <algorithm>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>

#include "serried/comm/collectives/own_backend.h"
#include "serried/comm/groups/group.h"
#include "serried/graph/passes/access.h"
#include "serried/graph/passes/passes.h"

namespace serried::graph {
namespace {

Argument equal_sizes(int64_t size, int64_t count) {
  return Argument::of(std::vector<int64_t>(size_t(count), size));
}

const Argument& group_of(const Node& node) {
  return *std::find_if(node.arguments.begin(), node.arguments.end(),
                       [](const Argument& argument) { return argument.kind == Argument::Kind::group; });
}

// How many of `part` along dim 0 make `whole`; 0 where they do not.
int64_t num_parts(const TensorMeta& whole, const TensorMeta& part) {
  if (part.sizes.empty() || whole.sizes.size() != part.sizes.size() || part.num_bytes() == 0) return 0;
  if (whole.dtype != part.dtype) return 0;
  if (!std::equal(part.sizes.begin() + 1, part.sizes.end(), whole.sizes.begin() + 1)) return 0;
  return whole.sizes[0] % part.sizes[0] == 0 ? whole.sizes[0] / part.sizes[0] : 0;
}

// Others sum and divide where c10d averages. A rank that waits later keeps c10d's call, and both have to say the same.
bool averages_as_c10d(const std::string& group_name) {
  try {
    const Group group = c10d::resolve_process_group(group_name);
    return detail::capabilities_of(*group->getBackend(at::kCPU)).takes_collectives;
  } catch (const std::exception&) {
    return false;  // a group of another process, or without a backend for the CPU
  }
}

bool is_average(const Node& node) {
  const c10d::ReduceOp* op = reduction_of(node);
  return op != nullptr && op->op_ == c10d::ReduceOp::AVG;
}

bool is_in(const std::vector<int32_t>& storages, int32_t storage) {
  return std::find(storages.begin(), storages.end(), storage) != storages.end();
}

constexpr std::string_view kStart = "serried::start_";

class StartsAndWaits {
 public:
  explicit StartsAndWaits(Graph& graph)
      : graph_(graph),
        accesses_(accesses_of(graph)),
        storages_(graph),
        immovable_(immovable_storages(graph)),
        is_dropped_(graph.nodes().size()),
        replacements_(graph.nodes().size()) {
    for (size_t i = 0; i < graph.nodes().size(); ++i) {
      for_each_operand(graph.nodes()[i], [&](ValueId id) { users_[id].push_back(i); });
      for_each_result(graph.nodes()[i], [&](ValueId id) { makers_.emplace(id, i); });
    }
  }

  void fold(const std::function<bool(const Node&)>& may_be_apart) {
    for (size_t i = 0; i < accesses_.size(); ++i) fold_at(i, may_be_apart);
    std::vector<Node> nodes;
    for (size_t i = 0; i < accesses_.size(); ++i) {
      nodes.insert(nodes.end(), replacements_[i].begin(), replacements_[i].end());
      if (!is_dropped_[i]) nodes.push_back(std::move(graph_.nodes()[i]));
    }
    graph_.nodes() = std::move(nodes);
  }

 private:
  void fold_at(size_t i, const std::function<bool(const Node&)>& may_be_apart) {
    const Node& node = graph_.nodes()[i];
    const size_t wait = wait_of(node);
    if (wait <= i) return;
    std::optional<Node> ours = is_ours(node) ? blocking_form(node) : is_plain(node) ? ours_for(node, i) : std::nullopt;
    if (!ours || (!has_views_alone(i + 1, wait) && !may_be_apart(*ours))) return;
    is_dropped_[i] = is_dropped_[wait] = true;
    for_each_result(*ours, [&](ValueId id) { is_dropped_[makers_.at(id)] = true; });
    replacements_[i] = {*ours};
    if (ours->results.size() == 1 && ours->results[0].size() > 1) replacements_[i] = gathered_and_split(*ours);
    for (Node& replacement : replacements_[i]) replacement.phase = node.phase;
  }

  static bool is_ours(const Node& node) { return node.op.operator_name().name.starts_with(kStart); }

  // The same arguments; the Work is gone.
  static Node blocking_form(const Node& node) {
    std::vector<std::vector<ValueId>> results(node.results.begin(), node.results.end() - 1);
    const std::string name = "serried::" + node.op.operator_name().name.substr(kStart.size());
    return make_node(name.c_str(), node.arguments, std::move(results));
  }

  // 0 where nobody waits, or the Work is used otherwise.
  size_t wait_of(const Node& node) const {
    if (node.results.empty() || node.results.back().size() != 1) return 0;
    const auto users = users_.find(node.results.back()[0]);
    if (users == users_.end() || users->second.size() != 1) return 0;
    const size_t user = users->second[0];
    return graph_.nodes()[user].op.operator_name().name == "serried::wait" ? user : 0;
  }

  bool has_views_alone(size_t begin, size_t end) const {
    return std::all_of(graph_.nodes().begin() + int64_t(begin), graph_.nodes().begin() + int64_t(end),
                       [&](const Node& node) { return is_alias(graph_, node); });
  }

  // A call of c10d on dense CPU tensors without a timeout or factor of its own.
  bool is_plain(const Node& node) const {
    if (!node.op.operator_name().name.starts_with("c10d::") || is_premultiplied(node)) return false;
    if (is_average(node) && !averages_as_c10d(node.group_name())) return false;
    const c10::IValue& timeout = constant_named(node, "timeout");
    bool fits = timeout.isInt() && timeout.toInt() == -1;
    std::set<ValueId> operands;
    for_each_operand(node, [&](ValueId id) {
      fits &= is_dense_cpu(graph_.value(id).meta);
      operands.insert(id);
    });
    for_each_result(node,
                    [&](ValueId id) { fits &= graph_.value(id).kind == ValueKind::work || operands.count(id) > 0; });
    return fits;
  }

  std::optional<Node> ours_for(const Node& node, size_t i) const {
    const std::string& name = node.op.operator_name().name;
    if (name == "c10d::allreduce_") return reduced_in_place(node);
    if (name == "c10d::broadcast_") return broadcast_in_place(node);
    if (name == "c10d::_allgather_base_") return gathered(node, i);
    if (name == "c10d::_reduce_scatter_base_") return scattered(node, i);
    if (name == "c10d::alltoall_base_") return exchanged(node, i);
    if (name == "c10d::allgather_") return gathered_list(node, i);
    return std::nullopt;
  }

  static std::optional<Node> reduced_in_place(const Node& node) {
    const bool is_sparse = !node.arguments[3].ids.empty();
    if (node.arguments[0].ids.size() != 1 || is_sparse) return std::nullopt;
    return make_node("serried::all_reduce_",
                     {Argument::of_value(node.arguments[0].ids[0]), group_of(node), node.arguments[2]}, {});
  }

  static std::optional<Node> broadcast_in_place(const Node& node) {
    if (node.arguments[0].ids.size() != 1 || constant_named(node, "root_tensor").toInt() != 0) return std::nullopt;
    return make_node("serried::broadcast_",
                     {Argument::of_value(node.arguments[0].ids[0]), group_of(node), node.arguments[2]}, {});
  }

  std::optional<Node> gathered(const Node& node, size_t i) const {
    const ValueId out = node.arguments[0].ids[0], in = node.arguments[1].ids[0];
    const int64_t count = num_parts(graph_.value(out).meta, graph_.value(in).meta);
    if (count > 0 && is_fresh(out, i)) return gather_of(in, group_of(node), {out}, count);
    if (!lie_in_a_row(out, in)) return std::nullopt;
    return make_node("serried::all_gather_into", {Argument::of_value(out), Argument::of_value(in), group_of(node)}, {});
  }

  Node gather_of(ValueId in, const Argument& group, std::vector<ValueId> results, int64_t count) const {
    return make_node(
        "serried::all_gather",
        {Argument::of_value(in), group, Argument::of(int64_t(0)), equal_sizes(graph_.value(in).meta.sizes[0], count)},
        {std::move(results)});
  }

  std::optional<Node> scattered(const Node& node, size_t i) const {
    const ValueId out = node.arguments[0].ids[0], in = node.arguments[1].ids[0];
    const Argument& op = node.arguments[3];
    const int64_t count = num_parts(graph_.value(in).meta, graph_.value(out).meta);
    if (count > 0 && is_fresh(out, i)) {
      const Argument sizes = equal_sizes(graph_.value(out).meta.sizes[0], count);
      return make_node("serried::reduce_scatter",
                       {Argument::of_value(in), group_of(node), Argument::of(int64_t(0)), sizes, op}, {{out}});
    }
    if (!lie_in_a_row(out, in)) return std::nullopt;
    return make_node("serried::reduce_scatter_into",
                     {Argument::of_value(out), Argument::of_value(in), group_of(node), op}, {});
  }

  // Without sizes pieces are equal, and only the group knows how many there are.
  std::optional<Node> exchanged(const Node& node, size_t i) const {
    const ValueId out = node.arguments[0].ids[0], in = node.arguments[1].ids[0];
    const Argument &received = node.arguments[3], &sent = node.arguments[4];
    const size_t num_received = received.constant.toListRef().size(), num_sent = sent.constant.toListRef().size();
    if (num_received == 0 && num_sent == 0 && lie_in_a_row(out, in)) {
      return make_node("serried::all_to_all_into", {Argument::of_value(out), Argument::of_value(in), group_of(node)},
                       {});
    }
    const TensorMeta &to = graph_.value(out).meta, &from = graph_.value(in).meta;
    const bool fits = num_received > 0 && num_received == num_sent && !from.sizes.empty() && to.dtype == from.dtype &&
                      to.sizes.size() == from.sizes.size() &&
                      std::equal(to.sizes.begin() + 1, to.sizes.end(), from.sizes.begin() + 1);
    if (!fits || !is_fresh(out, i)) return std::nullopt;
    const Argument first = Argument::of(int64_t(0));
    return make_node("serried::all_to_all", {Argument::of_value(in), group_of(node), first, first, sent, received},
                     {{out}});
  }

  // The results are all parts; gathered_and_split makes them views of one tensor.
  std::optional<Node> gathered_list(const Node& node, size_t i) const {
    const std::vector<ValueId>& outs = node.arguments[0].ids;
    if (node.arguments[1].ids.size() != 1 || outs.size() < 2) return std::nullopt;
    const ValueId in = node.arguments[1].ids[0];
    for (ValueId out : outs) {
      if (num_parts(graph_.value(out).meta, graph_.value(in).meta) != 1 || !is_fresh(out, i)) return std::nullopt;
      if (storages_.escapes(out) || immovable_.count(graph_.value(out).storage) > 0) return std::nullopt;
      if (std::count(outs.begin(), outs.end(), out) > 1) return std::nullopt;
    }
    return gather_of(in, group_of(node), outs, int64_t(outs.size()));
  }

  std::vector<Node> gathered_and_split(Node gather) {
    const std::vector<ValueId> parts = gather.results[0];
    TensorMeta meta = graph_.value(parts[0]).meta;
    const int64_t size = meta.sizes[0], length = meta.num_bytes() / int64_t(c10::elementSize(meta.dtype));
    meta.sizes[0] *= int64_t(parts.size());
    const int32_t storage = new_storage(graph_);
    const ValueId whole = graph_.add_value({.meta = std::move(meta), .storage = storage});
    for (size_t k = 0; k < parts.size(); ++k)
      move_values(graph_, graph_.value(parts[k]).storage, storage, length * int64_t(k));
    gather.results = {{whole}};
    return {gather, make_node("aten::split", {Argument::of_value(whole), Argument::of(size), Argument::of(int64_t(0))},
                              {parts}, "Tensor")};
  }

  bool lie_in_a_row(ValueId a, ValueId b) const {
    return is_contiguous(graph_.value(a).meta) && is_contiguous(graph_.value(b).meta);
  }

  // Made for the collective at `i`: all of a storage that nobody has touched since it was made.
  bool is_fresh(ValueId id, size_t i) const {
    const auto maker = makers_.find(id);
    const TensorMeta& meta = graph_.value(id).meta;
    if (maker == makers_.end() || is_dropped_[maker->second] || !makes_unwritten(graph_.nodes()[maker->second].op))
      return false;
    if (meta.offset != 0 || !is_contiguous(meta) || storages_.changes_layout(id)) return false;
    const int32_t storage = graph_.value(id).storage;
    for (size_t k = maker->second + 1; k < i; ++k) {
      const Access& access = accesses_[k];
      if (access.is_barrier || is_in(access.reads, storage) || is_in(access.writes, storage)) return false;
    }
    return true;
  }

  Graph& graph_;
  const std::vector<Access> accesses_;
  const Storages storages_;
  const std::set<int32_t> immovable_;
  std::unordered_map<ValueId, std::vector<size_t>> users_;
  std::unordered_map<ValueId, size_t> makers_;
  std::vector<bool> is_dropped_;
  std::vector<std::vector<Node>> replacements_;
};

}  // namespace

void join_starts_and_waits(Graph& graph, const std::function<bool(const Node& ours)>& may_be_apart) {
  StartsAndWaits(graph).fold(may_be_apart);
}

}  // namespace serried::graph

namespace serried::passes {

Pass functional_collectives() {
  // What runs beside other work goes on doing so.
  const auto never = [](const graph::Node&) { return false; };
  return {"functional_collectives", [never](graph::Graph& graph) { graph::join_starts_and_waits(graph, never); }};
}

}  // namespace serried::passes
