// Counts strong references, less the one that autograd takes while a graph lives.
#include "serried/graph/record/handles.h"

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

// The newest of those that meant nothing; one that is forgotten and comes again costs one more recording.
constexpr size_t kMostCounts = 8;

size_t count_handles(const WeakTensor& tensor) {
  return num_handles(tensor);
}

size_t count_handles(const WeakGenerator& generator) {
  return generator.use_count();
}

const void* address_of(const WeakTensor& tensor) {
  return tensor.address();
}

const void* address_of(const WeakGenerator& generator) {
  return generator._unsafe_get_target();
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

size_t num_handles(const WeakTensor& tensor) {
  const size_t count = tensor.num_handles();
  return count == 0 ? 0 : count - size_t(is_held_by_autograd(*tensor.address()));
}

HandleCounts::HandleCounts(const Recording& recording) {
  const std::unordered_set<const c10::TensorImpl*> gradients = gradients_of_leaves(recording);
  for (const OuterTensor& outer : recording.outer_tensors) {
    if (gradients.count(outer.tensor.address()) != 0) continue;
    const size_t count = outer.is_of_surroundings() ? count_handles(outer.tensor) : 0;
    if (count > 0) tensors_.push_back({outer.tensor, {count}});
  }
  for (const WeakGenerator& generator : recording.generators) {
    const size_t count = count_handles(generator);
    if (count > 0) generators_.push_back({generator, {count}});
  }
}

template <class Weak>
void HandleCounts::Counted<Weak>::add(const std::vector<Counted>& more) {
  for (const Counted& other : more) {
    if (address_of(other.object) != address_of(object)) continue;
    counts.append(other.counts.begin(), other.counts.end());
    if (counts.size() > kMostCounts) counts.resize(kMostCounts);
  }
}

template <class Weak>
bool HandleCounts::Counted<Weak>::holds() const {
  const size_t count = count_handles(object);
  return count == 0 || std::find(counts.begin(), counts.end(), count) != counts.end();
}

void HandleCounts::add(const HandleCounts& other) {
  for (auto& counted : tensors_) counted.add(other.tensors_);
  for (auto& counted : generators_) counted.add(other.generators_);
}

bool HandleCounts::hold() const {
  const auto holds = [](const auto& counted) { return counted.holds(); };
  return std::all_of(tensors_.begin(), tensors_.end(), holds) &&
         std::all_of(generators_.begin(), generators_.end(), holds);
}

std::string HandleCounts::why_not() const {
  const auto text = [](const std::string& what, const auto& counted) {
    return c10::str(what, " had ", counted.counts.front(), " handles and has ", count_handles(counted.object));
  };
  for (const auto& counted : tensors_) {
    if (counted.holds()) continue;
    const std::string name = "the tensor " + meta_of(counted.object.lock()).to_string();
    return text(name, counted);
  }
  for (const auto& counted : generators_) {
    if (!counted.holds()) return text("a generator", counted);
  }
  return "";
}

}  // namespace serried::graph
