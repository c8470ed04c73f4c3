// Finds the nodes between output and input, listens where parameters branch off, and cuts the graph there.
#include "serried/parallel/pipeline/backward_split.h"

#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <unordered_map>
#include <utility>

#include "serried/tape/tape.h"

namespace serried::detail {
namespace {

using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Engine;
using torch::autograd::Node;
using torch::autograd::variable_list;
using NodePtr = c10::intrusive_ptr<Node>;

// set_next_edge asserts that an edge leads somewhere; to lead nowhere is what cuts the graph.
struct NextEdges : Node {
  static edge_list& of(Node& node) { return node.*(&NextEdges::next_edges_); }
};

// The nodes from which a node can be reached, as a walk from the root finds them.
class Closure {
 public:
  Closure(const NodePtr& root, Node* target) {
    leads_[target] = true;
    std::vector<std::pair<Node*, size_t>> path{{root.get(), 0}};  // nodes, and which edge of each comes next
    leads_.try_emplace(root.get(), false);
    while (!path.empty()) {
      const auto [node, next] = path.back();
      if (next == node->num_outputs()) {
        path.pop_back();
        if (!path.empty() && leads_[node]) leads_[path.back().first] = true;
        continue;
      }
      ++path.back().second;
      Node* after = node->next_edge(next).function.get();
      if (after == nullptr) continue;
      if (leads_.try_emplace(after, false).second) {
        path.emplace_back(after, 0);
      } else if (leads_[after]) {
        leads_[node] = true;
      }
    }
  }

  bool has(const Node* node) const {
    const auto found = leads_.find(node);
    return found != leads_.end() && found->second;
  }

  /// Those of the closure with an edge that leaves it, in no order.
  std::vector<NodePtr> exits(const NodePtr& root) const {
    std::vector<NodePtr> found, open{root};
    std::unordered_map<const Node*, bool> seen{{root.get(), true}};
    while (!open.empty()) {
      const NodePtr node = std::move(open.back());
      open.pop_back();
      bool leaves = false;
      for (const Edge& edge : node->next_edges()) {
        if (!edge.is_valid()) continue;
        if (!has(edge.function.get())) {
          leaves = true;
        } else if (seen.try_emplace(edge.function.get(), true).second) {
          open.push_back(edge.function);
        }
      }
      if (leaves) found.push_back(node);
    }
    return found;
  }

 private:
  std::unordered_map<const Node*, bool> leads_;
};

// Keeps what flows into a node, behind all other hooks on it.
struct KeepGradients final : torch::autograd::FunctionPreHook {
  explicit KeepGradients(std::shared_ptr<variable_list> kept_) : kept(std::move(kept_)) {}
  variable_list operator()(const variable_list& gradients) override {
    *kept = gradients;
    return gradients;
  }
  std::shared_ptr<variable_list> kept;
};

// A second root. From one alone the engine starts without listing it among the nodes of the backward, and DDP looks
// there for nodes of its forward.
struct Nowhere final : Node {
  Nowhere() { add_input_metadata(gradient()); }
  variable_list apply(variable_list&&) override { return {}; }
  static const at::Tensor& gradient() {
    static const at::Tensor zero = [] {
      const tape::Pause off_tape;
      return at::zeros({});
    }();
    return zero;
  }
};

// What hooks have done to a gradient is in what was kept: they must not do it again.
void take_off_hooks(Node& node) {
  node.pre_hooks().clear();
  node.tensor_pre_hooks().clear();
  node.retains_grad_hooks().clear();
}

}  // namespace

void run_whole_backward(const Edge& root, const at::Tensor& gradient) {
  Engine::get_default_engine().execute({root}, {gradient}, /*keep_graph=*/false, /*create_graph=*/false,
                                       /*accumulate_grad=*/true);
}

SplitBackward::SplitBackward(Edge root, at::Tensor gradient, const at::Tensor& input) {
  if (!input.defined() || !input.requires_grad()) {
    leave_all(std::move(root), std::move(gradient));
    return;
  }
  const Edge target = torch::autograd::impl::gradient_edge(input);
  const Closure closure(root.function, target.function.get());
  if (!closure.has(root.function.get())) {
    leave_all(std::move(root), std::move(gradient));
    return;
  }
  const bool is_passed_on = root.function == target.function;
  const std::vector<NodePtr> exits = is_passed_on ? std::vector<NodePtr>() : closure.exits(root.function);
  std::vector<std::shared_ptr<variable_list>> kept;
  for (const NodePtr& exit : exits) {
    kept.push_back(std::make_shared<variable_list>());
    exit->add_pre_hook(std::make_unique<KeepGradients>(kept.back()));
  }
  input_gradient_ =
      Engine::get_default_engine().execute({root}, {gradient}, /*keep_graph=*/true,
                                           /*create_graph=*/false, /*accumulate_grad=*/false, {target})[0];
  for (size_t i = 0; i < exits.size(); ++i) {
    take_off_hooks(*exits[i]);
    for (Edge& edge : NextEdges::of(*exits[i])) {
      if (edge.is_valid() && closure.has(edge.function.get())) edge = Edge();
    }
    for (uint32_t nr = 0; nr < kept[i]->size(); ++nr) {
      if (!(*kept[i])[nr].defined()) continue;
      roots_.emplace_back(exits[i], nr);
      gradients_.push_back(std::move((*kept[i])[nr]));
    }
  }
}

void SplitBackward::leave_all(Edge root, at::Tensor gradient) {
  roots_ = {std::move(root)};
  gradients_ = {std::move(gradient)};
}

void SplitBackward::run_weights() {
  edge_list roots = std::exchange(roots_, {});
  variable_list gradients = std::exchange(gradients_, {});
  if (roots.empty()) return;
  roots.emplace_back(c10::make_intrusive<Nowhere>(), 0);
  gradients.push_back(Nowhere::gradient());
  Engine::get_default_engine().execute(roots, gradients, /*keep_graph=*/false, /*create_graph=*/false,
                                       /*accumulate_grad=*/true);
}

}  // namespace serried::detail
