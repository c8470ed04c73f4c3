// Turns the same in-place op on many tensors into one op on lists, as optimizers leave them.
#include <string>
#include <unordered_map>

#include "serried/graph/passes/access.h"
#include "serried/graph/passes/passes.h"
#include "serried/graph/passes/plan_memory.h"
#include "serried/graph/text/text.h"

namespace serried::passes {
namespace {

using namespace serried::graph;

struct ListOp {
  const char* name;
  const char* overload;
};

// On the CPU each of them calls its counterpart tensor by tensor, with the same arguments in the same order.
const ListOp* list_op_of(const Node& node) {
  static const std::unordered_map<std::string, ListOp> ops = {
      {"aten::add_.Tensor", {"aten::_foreach_add_", "List"}},
      {"aten::addcdiv_", {"aten::_foreach_addcdiv_", "Scalar"}},
      {"aten::addcmul_", {"aten::_foreach_addcmul_", "Scalar"}},
      {"aten::copy_", {"aten::_foreach_copy_", ""}},
      {"aten::div_.Scalar", {"aten::_foreach_div_", "Scalar"}},
      {"aten::div_.Tensor", {"aten::_foreach_div_", "List"}},
      {"aten::lerp_.Scalar", {"aten::_foreach_lerp_", "Scalar"}},
      {"aten::mul_.Scalar", {"aten::_foreach_mul_", "Scalar"}},
      {"aten::mul_.Tensor", {"aten::_foreach_mul_", "List"}},
      {"aten::sub_.Tensor", {"aten::_foreach_sub_", "List"}},
      {"aten::zero_", {"aten::_foreach_zero_", ""}},
  };
  const auto found = ops.find(c10::toString(node.op.operator_name()));
  return found != ops.end() ? &found->second : nullptr;
}

// Nodes that may become one, or one node alone.
struct Cluster {
  std::vector<Node> members;
};

// Empty where the node has to stay alone.
std::string key_of(const Graph& graph, const Node& node) {
  if (list_op_of(node) == nullptr) return "";
  if (node.results.size() != 1 || node.results[0] != node.arguments[0].ids) return "";
  std::string key = c10::toString(node.op.operator_name());
  for (const Argument& argument : node.arguments) {
    if (argument.kind == Argument::Kind::constant) {
      key.append(",").append(constant_text(argument.constant));
    } else if (argument.kind != Argument::Kind::value || argument.ids[0] == kNoValue ||
               !is_dense_cpu(graph.value(argument.ids[0]).meta)) {
      return "";
    }
  }
  return key;
}

// Puts nodes into clusters, each as early as its operands and their memory allow; clusters keep their order.
class Clusters {
 public:
  explicit Clusters(const Graph& graph)
      : graph_(graph),
        made_(graph.values().size(), -1),
        last_write_(size_t(new_storage(graph)), -1),
        last_use_(last_write_) {}

  void add(const Node& node, const Access& access) {
    const std::string key = key_of(graph_, node);
    const int64_t earliest = std::max(last_conflict(access), last_maker(node)) + 1;
    const auto open = key.empty() || access.is_barrier ? open_.end() : open_.find(key);
    int64_t place = int64_t(clusters_.size());
    if (open != open_.end() && open->second >= earliest) {
      place = open->second;
      clusters_[size_t(place)].members.push_back(node);
    } else {
      clusters_.push_back({{node}});
      if (!key.empty()) open_[key] = place;
    }
    for_each_result(node, [&](ValueId id) { made_[size_t(id)] = place; });
    note(access, place);
  }

  std::vector<Cluster> take() { return std::move(clusters_); }

 private:
  // Views write no memory, and still have to be there.
  int64_t last_maker(const Node& node) const {
    int64_t last = -1;
    for_each_operand(node, [&](ValueId id) { last = std::max(last, made_[size_t(id)]); });
    return last;
  }

  int64_t last_conflict(const Access& access) const {
    int64_t last = last_barrier_;
    for (int32_t storage : access.reads) last = std::max(last, last_write_[size_t(storage)]);
    for (int32_t storage : access.writes) last = std::max(last, last_use_[size_t(storage)]);
    return last;
  }

  void note(const Access& access, int64_t place) {
    if (access.is_barrier) last_barrier_ = place;
    for (int32_t storage : access.reads) last_use_[size_t(storage)] = std::max(last_use_[size_t(storage)], place);
    for (int32_t storage : access.writes) {
      last_write_[size_t(storage)] = place;
      last_use_[size_t(storage)] = std::max(last_use_[size_t(storage)], place);
    }
  }

  const Graph& graph_;
  std::vector<Cluster> clusters_;
  std::unordered_map<std::string, int64_t> open_;  // the latest cluster of each key
  std::vector<int64_t> made_;                      // per value, the cluster that gives it
  std::vector<int64_t> last_write_, last_use_;     // per storage
  int64_t last_barrier_ = -1;
};

Node fused(const std::vector<Node>& members) {
  const ListOp& target = *list_op_of(members[0]);
  Node node{c10::Dispatcher::singleton().findSchemaOrThrow(target.name, target.overload), members[0].arguments, {}};
  node.phase = common_phase(members);
  for (size_t k = 0; k < node.arguments.size(); ++k) {
    if (node.arguments[k].kind != Argument::Kind::value) continue;
    std::vector<ValueId> ids;
    for (const Node& member : members) ids.push_back(member.arguments[k].ids[0]);
    node.arguments[k] = Argument::of_values(std::move(ids));
  }
  return node;
}

void run_fuse_foreach(Graph& graph) {
  const std::vector<Access> accesses = accesses_of(graph);
  Clusters clusters(graph);
  for (size_t i = 0; i < accesses.size(); ++i) clusters.add(graph.nodes()[i], accesses[i]);
  std::vector<Node> nodes;
  for (const Cluster& cluster : clusters.take()) {
    nodes.push_back(cluster.members.size() == 1 ? cluster.members[0] : fused(cluster.members));
  }
  graph.nodes() = std::move(nodes);
  plan_again(graph);
}

}  // namespace

Pass fuse_foreach() {
  return {"fuse_foreach", run_fuse_foreach};
}

}  // namespace serried::passes
