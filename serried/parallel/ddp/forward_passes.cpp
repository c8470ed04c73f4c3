// A backward is known by the nodes it is going to run: outputs are not the only way out of a forward, a module may keep
// an auxiliary loss in a member.
#include "serried/parallel/ddp/forward_passes.h"

#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>

namespace serried::detail {

ForwardPass::ForwardPass(const std::vector<at::Tensor>& tensors, uint64_t first_node, bool synchronise)
    : synchronise(synchronise),
      thread(at::RecordFunction::currentThreadId()),
      first_node(first_node),
      end_node(at::sequence_number::peek()) {
  for (const at::Tensor& output : tensors) {
    if (output.requires_grad() && output.grad_fn()) outputs.emplace_back(output.grad_fn());
  }
}

bool ForwardPass::made(const torch::autograd::Node& node) const {
  return node.thread_id() == thread && node.sequence_nr() >= first_node && node.sequence_nr() < end_node;
}

void ForwardPasses::add(PassPtr pass) {
  open_.push_back(std::move(pass));
  decided_task_ = -1;
}

// Asked for every gradient outside of a round, so the answer is kept while the backward lasts.
bool ForwardPasses::synchronise_this_backward() {
  const int task = torch::autograd::get_current_graph_task_id();
  if (task != decided_task_) decision_ = goes_through_one();
  decided_task_ = task;
  return decision_;
}

bool ForwardPasses::goes_through_one() const {
  const auto* nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  if (nodes == nullptr) return false;
  std::vector<const ForwardPass*> candidates;
  for (const auto* passes : {&open_, &closed_}) {
    for (const PassPtr& pass : *passes) {
      if (pass->synchronise) candidates.push_back(pass.get());
    }
  }
  const auto is_made_by_one = [&](const torch::autograd::Node* node) {
    return std::any_of(candidates.begin(), candidates.end(), [&](const auto* pass) { return pass->made(*node); });
  };
  return !candidates.empty() && std::any_of(nodes->begin(), nodes->end(), is_made_by_one);
}

void ForwardPasses::close() {
  closed_.insert(closed_.end(), open_.begin(), open_.end());
  open_.clear();
  decided_task_ = -1;
  std::erase_if(closed_, [](const PassPtr& pass) {
    return std::all_of(pass->outputs.begin(), pass->outputs.end(), [](const auto& node) { return node.expired(); });
  });
}

}  // namespace serried::detail
