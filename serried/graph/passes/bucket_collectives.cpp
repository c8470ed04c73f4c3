// Joins collectives that follow each other into one over a flat buffer.
#include <c10/util/strides.h>

#include <algorithm>
#include <set>

#include "serried/base/error.h"
#include "serried/graph/passes/access.h"
#include "serried/graph/passes/collectives.h"
#include "serried/graph/passes/passes.h"
#include "serried/graph/passes/plan_memory.h"

namespace serried::passes {
namespace {

using namespace serried::graph;
using Kind = SimpleCollective::Kind;

struct Member {
  Node node;
  SimpleCollective collective;
};

int64_t count_of(const TensorMeta& meta) {
  return meta.num_bytes() / int64_t(c10::elementSize(meta.dtype));
}

// Writes the nodes of one bucket.
class BucketWriter {
 public:
  BucketWriter(Graph& graph, const std::vector<Member>& members)
      : graph_(graph), members_(members), next_storage_(new_storage(graph)) {}

  std::vector<Node> write() {
    switch (members_[0].collective.kind) {
      case Kind::all_reduce:
      case Kind::all_reduce_in_place: write_all_reduce(); break;
      case Kind::all_gather: write_all_gather(); break;
      case Kind::reduce_scatter: write_reduce_scatter(); break;
      case Kind::none: break;
    }
    const Phase phase = phase_of_members();
    for (Node& node : nodes_) node.phase = phase;
    return std::move(nodes_);
  }

 private:
  Phase phase_of_members() const {
    std::vector<Node> nodes;
    for (const Member& member : members_) nodes.push_back(member.node);
    return common_phase(nodes);
  }

  ValueId add_value(c10::DimVector sizes, int32_t storage) {
    TensorMeta meta = graph_.value(members_[0].collective.operand).meta;
    meta.strides = c10::contiguous_strides(sizes);
    meta.sizes = std::move(sizes);
    meta.offset = 0;
    return graph_.add_value({.kind = ValueKind::computed, .meta = std::move(meta), .storage = storage});
  }

  void add_node(const char* name, std::vector<Argument> arguments, std::vector<std::vector<ValueId>> results) {
    nodes_.push_back(make_node(name, std::move(arguments), std::move(results)));
  }

  // The same elements in a row, as `sizes`.
  ValueId reshaped(ValueId x, const c10::DimVector& sizes) {
    if (!is_contiguous(graph_.value(x).meta)) {
      const ValueId dense = add_value(graph_.value(x).meta.sizes, next_storage_++);
      add_node("aten::clone", {Argument::of_value(x), Argument::of(at::MemoryFormat::Contiguous)}, {{dense}});
      x = dense;
    }
    const ValueId view = add_value(sizes, graph_.value(x).storage);
    graph_.value(view).meta.offset = graph_.value(x).meta.offset;
    add_node("aten::view", {Argument::of_value(x), Argument::of(std::vector<int64_t>(sizes.begin(), sizes.end()))},
             {{view}});
    return view;
  }

  ValueId joined(const std::vector<ValueId>& parts, int64_t dim, const c10::DimVector& sizes) {
    const ValueId whole = add_value(sizes, next_storage_++);
    add_node("aten::cat", {Argument::of_values(parts), Argument::of(dim)}, {{whole}});
    return whole;
  }

  void cut(ValueId whole, int64_t offset, const TensorMeta& meta, ValueId part) {
    add_node("aten::as_strided",
             {Argument::of_value(whole), Argument::of(std::vector<int64_t>(meta.sizes.begin(), meta.sizes.end())),
              Argument::of(std::vector<int64_t>(meta.strides.begin(), meta.strides.end())), Argument::of(offset)},
             {{part}});
  }

  // The result of a member, and all views of it, lie in the bucket from now on.
  void cut_result(ValueId whole, int64_t offset, ValueId result) {
    cut(whole, offset, graph_.value(result).meta, result);
    move_values(graph_, graph_.value(result).storage, graph_.value(whole).storage, offset);
  }

  const Argument& group() const { return members_[0].node.arguments[1]; }

  /// Calls `fn(member, offset, count)`: where its elements lie in a rank's row of the bucket, and how many they are.
  template <class Fn>
  void for_each_member(Fn fn) const {
    int64_t offset = 0;
    for (const auto& [node, member] : members_) {
      const ValueId row = member.kind == Kind::reduce_scatter ? member.result : member.operand;
      const int64_t count = count_of(graph_.value(row).meta);
      fn(member, offset, count);
      offset += count;
    }
  }

  int64_t row_length() const {
    int64_t length = 0;
    for_each_member([&](const SimpleCollective&, int64_t offset, int64_t count) { length = offset + count; });
    return length;
  }

  // Each operand as `leading` and its elements, joined along the last dim.
  ValueId joined_operands(const c10::DimVector& leading) {
    const auto followed_by = [&](int64_t size) {
      c10::DimVector sizes = leading;
      sizes.push_back(size);
      return sizes;
    };
    std::vector<ValueId> parts;
    for_each_member([&](const SimpleCollective& member, int64_t, int64_t count) {
      parts.push_back(reshaped(member.operand, followed_by(count)));
    });
    return joined(parts, int64_t(leading.size()), followed_by(row_length()));
  }

  void write_all_reduce() {
    const ValueId whole = joined_operands({});
    add_node("serried::all_reduce_", {Argument::of_value(whole), group(), members_[0].node.arguments[2]}, {});
    for_each_member([&](const SimpleCollective& member, int64_t offset, int64_t) {
      if (member.kind == Kind::all_reduce) {
        cut_result(whole, offset, member.result);
      } else {
        copy_back(whole, offset, member.operand);
      }
    });
  }

  void copy_back(ValueId whole, int64_t offset, ValueId target) {
    const ValueId part = add_value(graph_.value(target).meta.sizes, graph_.value(whole).storage);
    graph_.value(part).meta.offset = offset;
    cut(whole, offset, graph_.value(part).meta, part);
    add_node("aten::copy_", {Argument::of_value(target), Argument::of_value(part), Argument::of(false)}, {{target}});
  }

  // Rows of the bucket are ranks, so that each rank's pieces of all members lie in a row.
  void write_reduce_scatter() {
    const int64_t ranks = members_[0].collective.num_ranks;
    const ValueId whole = joined_operands({ranks});
    const ValueId mine = add_value({1, row_length()}, next_storage_++);
    add_node("serried::reduce_scatter",
             {Argument::of_value(whole), group(), Argument::of(int64_t(0)),
              Argument::of(std::vector<int64_t>(size_t(ranks), 1)), members_[0].node.arguments[4]},
             {{mine}});
    for_each_member(
        [&](const SimpleCollective& member, int64_t offset, int64_t) { cut_result(mine, offset, member.result); });
  }

  void write_all_gather() {
    const int64_t ranks = members_[0].collective.num_ranks;
    const ValueId mine = joined_operands({});
    const ValueId whole = add_value({ranks * row_length()}, next_storage_++);
    add_node("serried::all_gather",
             {Argument::of_value(mine), group(), Argument::of(int64_t(0)),
              Argument::of(std::vector<int64_t>(size_t(ranks), row_length()))},
             {{whole}});
    for_each_member([&](const SimpleCollective& member, int64_t offset, int64_t count) {
      gather_pieces(whole, offset, {ranks, count}, member.result);
    });
  }

  // Pieces of one member lie apart by the length of a rank's row.
  void gather_pieces(ValueId whole, int64_t offset, const c10::DimVector& sizes, ValueId result) {
    const ValueId apart = add_value(sizes, graph_.value(whole).storage);
    TensorMeta& meta = graph_.value(apart).meta;
    meta.offset = offset;
    meta.strides[0] = count_of(graph_.value(whole).meta) / sizes[0];
    cut(whole, offset, meta, apart);
    const ValueId dense = add_value(sizes, graph_.value(result).storage);
    add_node("aten::clone", {Argument::of_value(apart), Argument::of(at::MemoryFormat::Contiguous)}, {{dense}});
    const c10::DimVector& shape = graph_.value(result).meta.sizes;
    add_node("aten::view", {Argument::of_value(dense), Argument::of(std::vector<int64_t>(shape.begin(), shape.end()))},
             {{result}});
  }

  Graph& graph_;
  const std::vector<Member>& members_;
  int32_t next_storage_;
  std::vector<Node> nodes_;
};

// Holds collectives back while others may join them.
class Bucketing {
 public:
  Bucketing(Graph& graph, int64_t max_bytes)
      : graph_(graph),
        accesses_(accesses_of_parts(graph)),
        immovable_(immovable_storages(graph)),
        max_bytes_(max_bytes) {}

  std::vector<Node> run() {
    for (size_t i = 0; i < accesses_.size(); ++i) add(i);
    flush();
    return std::move(nodes_);
  }

 private:
  void add(size_t i) {
    const Node node = graph_.nodes()[i];
    const SimpleCollective collective = joinable(node);
    const bool fits = collective && !open_.empty() && open_[0].collective.likeness == collective.likeness &&
                      bytes_ + collective.bytes <= max_bytes_;
    if ((node.is_collective() && !fits) || needs_open(accesses_[i])) flush();
    if (!collective) {
      nodes_.push_back(node);
      return;
    }
    open_.push_back({node, collective});
    open_accesses_.push_back(accesses_[i]);
    bytes_ += collective.bytes;
    place_ = nodes_.size();
  }

  SimpleCollective joinable(const Node& node) const {
    const SimpleCollective collective = simple_collective(graph_, node);
    if (!collective || collective.kind == Kind::all_reduce_in_place) return collective;
    const int32_t storage = graph_.value(collective.result).storage;
    return storage < 0 || immovable_.count(storage) > 0 ? SimpleCollective() : collective;
  }

  bool needs_open(const Access& access) const {
    return std::any_of(open_accesses_.begin(), open_accesses_.end(),
                       [&](const Access& open) { return in_conflict(open, access); });
  }

  // Where the last member stood: earlier not all operands are there.
  void flush() {
    if (open_.empty()) return;
    const std::vector<Node> written =
        open_.size() == 1 ? std::vector<Node>{open_[0].node} : BucketWriter(graph_, open_).write();
    nodes_.insert(nodes_.begin() + int64_t(place_), written.begin(), written.end());
    open_.clear();
    open_accesses_.clear();
    bytes_ = 0;
  }

  Graph& graph_;
  const std::vector<Access> accesses_;
  const std::set<int32_t> immovable_;
  const int64_t max_bytes_;
  std::vector<Node> nodes_;
  std::vector<Member> open_;
  std::vector<Access> open_accesses_;
  int64_t bytes_ = 0;
  size_t place_ = 0;  // of the last member, in nodes_
};

}  // namespace

Pass bucket_collectives(double megabytes) {
  if (!(megabytes > 0)) {
    raise<c10::ValueError>({"bucket_collectives", c10::str("a bucket of ", megabytes, " MiB holds nothing"),
                            "give a size above 0, or leave the pass out"});
  }
  return {"bucket_collectives", [max_bytes = int64_t(megabytes * (1 << 20))](Graph& graph) {
            graph.nodes() = Bucketing(graph, max_bytes).run();
            plan_again(graph);
          }};
}

}  // namespace serried::passes
