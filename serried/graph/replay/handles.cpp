// Counts strong references, less the one that autograd takes while a graph lives.
#include "serried/graph/replay/handles.h"

#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <unordered_set>

namespace serried::graph {
namespace {

// The node that adds to a leaf's gradient holds the leaf, and lives as long as any graph that ends there.
bool is_held_by_autograd(const c10::TensorImpl& tensor) {
  const auto* meta = static_cast<const torch::autograd::AutogradMeta*>(tensor.autograd_meta());
  return meta != nullptr && !meta->grad_accumulator_.expired();
}

// A tensor whose handles came and went so often for nothing tells nothing: threads that look at it, say.
constexpr size_t kMostCounts = 8;

size_t count_handles(const WeakTensor& tensor) {
  const size_t count = tensor.num_handles();
  return count == 0 ? 0 : count - size_t(is_held_by_autograd(*tensor.address()));
}

// Effects guard these; buckets and hooks take and drop handles of them as they like.
std::unordered_set<const c10::TensorImpl*> gradients_of_leaves(const Recording& recording) {
  std::unordered_set<const c10::TensorImpl*> gradients;
  for (const OuterTensor& outer : recording.outer_tensors) {
    const at::Tensor t = outer.tensor.lock();
    if (t.defined() && t.is_leaf() && t.grad().defined()) gradients.insert(t.grad().unsafeGetTensorImpl());
  }
  return gradients;
}

}  // namespace

HandleCounts::HandleCounts(const Recording& recording) {
  const std::unordered_set<const c10::TensorImpl*> gradients = gradients_of_leaves(recording);
  for (const OuterTensor& outer : recording.outer_tensors) {
    if (gradients.count(outer.tensor.address()) != 0) continue;
    const size_t count = outer.is_of_surroundings() ? count_handles(outer.tensor) : 0;
    if (count > 0) tensors_.push_back({outer.tensor, {count}});
  }
}

void HandleCounts::add(const HandleCounts& other) {
  for (const Counted& more : other.tensors_) {
    const auto known = std::find_if(tensors_.begin(), tensors_.end(), [&](const Counted& counted) {
      return counted.tensor.address() == more.tensor.address();
    });
    if (known != tensors_.end()) known->counts.append(more.counts.begin(), more.counts.end());
  }
}

bool HandleCounts::Counted::holds() const {
  const size_t count = count_handles(tensor);
  return count == 0 || counts.size() > kMostCounts || std::find(counts.begin(), counts.end(), count) != counts.end();
}

bool HandleCounts::hold() const {
  return std::all_of(tensors_.begin(), tensors_.end(), [](const Counted& counted) { return counted.holds(); });
}

std::string HandleCounts::why_not() const {
  for (const Counted& counted : tensors_) {
    if (counted.holds()) continue;
    return c10::str("the tensor ", meta_of(counted.tensor.lock()).to_string(), " had ", counted.counts.front(),
                    " handles and has ", count_handles(counted.tensor));
  }
  return "";
}

}  // namespace serried::graph
