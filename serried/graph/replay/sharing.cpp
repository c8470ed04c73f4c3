// Looks storages up by address, and where torch does not own the memory compares bounds.
#include "serried/graph/replay/sharing.h"

#include <algorithm>

namespace serried::graph {
namespace {

bool is_before(const c10::Storage& a, const c10::StorageImpl* b) {
  return a.unsafeGetStorageImpl() < b;
}

// Gradients that a graph adds to had memory of their own.
bool are_gradients_apart(const std::vector<at::Tensor>& inputs, size_t num_arguments) {
  std::vector<const c10::StorageImpl*> gradients;
  for (size_t i = num_arguments; i < inputs.size(); ++i) {
    if (inputs[i].defined()) gradients.push_back(storage_of(inputs[i]));
  }
  std::sort(gradients.begin(), gradients.end());
  if (std::adjacent_find(gradients.begin(), gradients.end()) != gradients.end()) return false;
  return std::none_of(inputs.begin(), inputs.begin() + int64_t(num_arguments), [&](const at::Tensor& argument) {
    return std::binary_search(gradients.begin(), gradients.end(), storage_of(argument));
  });
}

}  // namespace

Sharing::Sharing(const Recording& replayable) : inputs_(replayable.inputs) {
  for (const Value& value : replayable.graph.values()) {
    if (!is_from_outside(value)) continue;
    surroundings_.push_back(value.tensor.storage());
    all_allocated_ &= is_allocated(*storage_of(value.tensor));
  }
  std::sort(surroundings_.begin(), surroundings_.end(),
            [](const c10::Storage& a, const c10::Storage& b) { return is_before(a, b.unsafeGetStorageImpl()); });
}

bool Sharing::is_of_surroundings(const c10::StorageImpl* storage) const {
  if (storage == nullptr) return false;
  const auto found = std::lower_bound(surroundings_.begin(), surroundings_.end(), storage, is_before);
  if (found != surroundings_.end() && found->unsafeGetStorageImpl() == storage) return true;
  if (all_allocated_ && is_allocated(*storage)) return false;
  return std::any_of(surroundings_.begin(), surroundings_.end(),
                     [&](const c10::Storage& other) { return overlap(*storage, *other.unsafeGetStorageImpl()); });
}

bool Sharing::are_in_place(const std::vector<at::Tensor>& inputs) const {
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (inputs[i].defined() && !inputs_[i].allows(inputs[i])) return false;
  }
  return true;
}

bool Sharing::holds(const std::vector<at::Tensor>& inputs, size_t num_arguments) const {
  if (!are_in_place(inputs)) return false;
  for (const at::Tensor& input : inputs) {
    if (is_of_surroundings(storage_of(input))) return false;
  }
  return inputs.size() == num_arguments || are_gradients_apart(inputs, num_arguments);
}

bool Sharing::fails_by_place(const std::vector<at::Tensor>& inputs, size_t num_arguments) const {
  return !are_in_place(inputs) && are_gradients_apart(inputs, num_arguments) &&
         std::none_of(inputs.begin(), inputs.end(),
                      [&](const at::Tensor& input) { return is_of_surroundings(storage_of(input)); });
}

std::string Sharing::why_not(const std::vector<at::Tensor>& inputs, size_t num_arguments) const {
  const auto name = [&](size_t i) {
    return i < num_arguments ? "input " + std::to_string(i) : "a gradient that the function adds to";
  };
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!inputs[i].defined()) continue;
    if (is_of_surroundings(storage_of(inputs[i]))) {
      return "memory of " + name(i) + " was its own and is that of a tensor the function uses";
    }
    if (!inputs_[i].allows(inputs[i])) return name(i) + " was one tensor in all recordings and is another one";
  }
  return are_gradients_apart(inputs, num_arguments) ? ""
                                                    : "a gradient that the function adds to has no memory of its own";
}

}  // namespace serried::graph
