// Which parameters a backward reaches, and what to say about those it does not.
#include <torch/csrc/autograd/graph_task.h>

#include <unordered_set>

#include "serried/base/error.h"
#include "serried/base/log.h"
#include "serried/comm/collectives/nan_check.h"
#include "serried/parallel/ddp/reducer.h"

namespace serried::detail {
namespace {

using torch::autograd::Node;

std::unordered_set<const Node*> reachable_from(const std::vector<ForwardPasses::PassPtr>& passes) {
  std::unordered_set<const Node*> seen;
  std::vector<c10::intrusive_ptr<Node>> open;
  for (const auto& pass : passes) {
    for (const auto& output : pass->outputs) {
      if (auto node = output.lock()) open.push_back(std::move(node));
    }
  }
  while (!open.empty()) {
    const auto node = std::move(open.back());
    open.pop_back();
    if (!seen.insert(node.get()).second) continue;
    for (const auto& edge : node->next_edges()) {
      if (edge.function) open.push_back(edge.function);
    }
  }
  return seen;
}

constexpr size_t kMostNamed = 20;

}  // namespace

// The engine has walked the graph already: what it is going to run is exact, whatever outputs the loss was made of.
std::vector<bool> Reducer::used_by_this_backward() const {
  const auto* nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  const auto* towards = torch::autograd::get_current_graph_task_exec_info();
  std::vector<bool> used(parameters_.size(), true);
  if (nodes == nullptr) return used;
  for (size_t i = 0; i < used.size(); ++i) {
    Node* accumulator = hooks_.node(i);
    used[i] = nodes->count(accumulator) != 0;
    if (!used[i] || towards == nullptr || towards->empty()) continue;
    const auto info = towards->find(accumulator);
    used[i] = info != towards->end() && info->second.should_execute();
  }
  return used;
}

std::vector<bool> Reducer::used_by_open_passes() const {
  const auto nodes = reachable_from(passes_.open());
  std::vector<bool> used(parameters_.size());
  for (size_t i = 0; i < used.size(); ++i) used[i] = nodes.count(hooks_.node(i)) != 0;
  return used;
}

void Reducer::log_unused() const {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (!round_.used[i]) log::write(log::Topic::comm, parameters_[i].name + " has no gradient in this iteration");
  }
}

void Reducer::raise_missing() const {
  const std::vector<bool> in_graph = used_by_open_passes();
  const bool several = passes_.open().size() > 1;
  std::string names;
  size_t num_missing = 0;
  // Mostly all ranks miss the same: one list is enough to read.
  const bool tells_all = group_->getRank() == 0 || log::enabled(log::Topic::comm);
  const size_t most_named = tells_all ? kMostNamed : 1;
  bool is_frozen = false;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (round_.ready[i]) continue;
    const bool frozen = !parameters_[i].tensor.requires_grad();
    is_frozen |= frozen;
    if (++num_missing > most_named) continue;
    const char* cause = frozen         ? "its requires_grad was set to false after the module was wrapped"
                        : !in_graph[i] ? "forward did not use it"
                        : several      ? "it belongs to another forward, made before this backward"
                                       : "the output that depends on it is not part of the loss";
    names += c10::str("\n    ", parameters_[i].name, " ", parameters_[i].tensor.sizes(), " of ", parameters_[i].module,
                      ": ", cause);
  }
  if (num_missing > most_named) {
    names += c10::str("\n    and ", num_missing - most_named, " more",
                      tells_all ? "" : "; rank 0 lists what it misses, SERRIED_LOG=comm lists them here");
  }
  const char* fix = is_frozen ? "set requires_grad before the module is wrapped: wrap it again; or pass "
                                "find_unused_parameters = true, without static_graph"
                    : options_.static_graph
                        ? "the training graph has changed: use the same parameters in every iteration, or leave out "
                          "static_graph"
                        : "use them in the loss, or pass find_unused_parameters = true (static_graph = true if they "
                          "are the same in every iteration), or name them in .ignore";
  raise<c10::ValueError>(
      {"backward",
       c10::str(num_missing, " of ", parameters_.size(),
                " parameters did not receive a gradient, so the average over ranks is not complete:", names),
       fix});
}

// A group that looks for NaN says where in the bucket it found one; users know parameters.
void Reducer::raise_if_nan(const Bucket& bucket) const {
  for (size_t slot = 0; slot < bucket.views.size(); ++slot) {
    const std::string found = find_nan(bucket.views[slot], group_->getRank());
    if (found.empty()) continue;
    const ManagedParameter& parameter = parameters_[bucket.members[slot]];
    raise<c10::ValueError>(
        {"backward",
         c10::str("the gradient of ", parameter.name, " of ", parameter.module, " is not a number: ", found), kNanFix});
  }
}

void Reducer::raise_ready_twice(size_t index) const {
  raise<c10::ValueError>(
      {"backward",
       c10::str(parameters_[index].name, " of ", parameters_[index].module,
                " received a second gradient in one backward, when the first was on its way to the other ranks"),
       "pass static_graph = true if a checkpointed part is used several times, or call backward once"});
}

void Reducer::check_count(size_t index) const {
  if (round_.num_fired[index] <= expected_fires_[index]) return;
  raise<c10::ValueError>(
      {"backward",
       c10::str("the training graph has changed, which static_graph forbids: ", parameters_[index].name, " of ",
                parameters_[index].module, " received ", round_.num_fired[index], " gradients, in the first iteration ",
                expected_fires_[index]),
       "use the same parameters equally often in every iteration, or leave out static_graph"});
}

void Reducer::warn_of_second_order() const {
  log::warn_once(
      "[DistributedDataParallel] backward runs with create_graph: first gradients are averaged, but gradients of "
      "gradients do not flow through that and stay this rank's own; use the module without the wrapper for such "
      "losses");
}

size_t Reducer::unused_bytes() const {
  size_t bytes = 0;
  for (size_t i = 0; i < last_used_.size(); ++i) {
    if (!last_used_[i]) bytes += parameters_[i].tensor.nbytes();
  }
  return bytes;
}

}  // namespace serried::detail
