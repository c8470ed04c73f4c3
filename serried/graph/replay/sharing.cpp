// Compares inputs by storage, and where torch does not own the memory by its bounds.
#include "serried/graph/replay/sharing.h"

#include <algorithm>

namespace serried::graph {
namespace {

bool is_from_outside(const Value& value) {
  return value.kind == ValueKind::persistent && value.tensor.defined() && value.tensor.has_storage();
}

bool found_by_itself(const Recording& recording, const c10::StorageImpl* storage) {
  return std::any_of(recording.externals.begin(), recording.externals.end(), [&](ValueId id) {
    const Value& value = recording.graph.value(id);
    return storage != nullptr && is_from_outside(value) && overlap(*storage, *storage_of(value.tensor));
  });
}

bool has_inputs_found_in(const Recording& recording, const Recording& other) {
  return std::any_of(recording.inputs.begin(), recording.inputs.end(), [&](const InputPlace& input) {
    const auto storage = input.storage.lock();
    return found_by_itself(other, storage.get());
  });
}

// Whether the surroundings have a tensor in the memory of an input: they may move together.
bool is_held_outside(const Recording& recording, const InputPlace& input) {
  return std::any_of(recording.residents.begin(), recording.residents.end(), [&](const Resident& resident) {
    return resident.is_of_surroundings() && resident.is_lasting && input.was_defined &&
           resident.place.storage == input.storage._unsafe_get_target();
  });
}

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

void compare_inputs(const Recording& first, Recording& second) {
  for (size_t i = 0; i < second.inputs.size(); ++i) {
    const InputPlace& before = first.inputs[i];
    InputPlace& now = second.inputs[i];
    const bool is_other = before.part.address() != now.part.address();
    const bool moved = is_other && before.storage._unsafe_get_target() != now.storage._unsafe_get_target();
    now.any_storage = (before.any_storage || moved) && !is_held_outside(second, now);
    now.any_offset = before.any_offset || moved || (is_other && before.offset != now.offset);
    now.any_tensor = before.any_tensor || is_other;
  }
}

bool shares_otherwise(const Recording& a, const Recording& b) {
  return has_inputs_found_in(a, b) || has_inputs_found_in(b, a);
}

bool is_apart(const Recording& recording, const std::vector<at::Tensor>& inputs) {
  return std::none_of(inputs.begin(), inputs.end(),
                      [&](const at::Tensor& input) { return found_by_itself(recording, storage_of(input)); });
}

bool has_memory_of_inputs(const Recording& recording, const std::vector<at::Tensor>& arguments) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (storage_of(arguments[i]) != recording.inputs.at(i).storage._unsafe_get_target()) return false;
  }
  return true;
}

bool is_in_place(const Recording& recording) {
  return std::all_of(recording.residents.begin(), recording.residents.end(), [](const Resident& resident) {
    const at::Tensor t = resident.tensor.lock();
    return !resident.is_of_surroundings() || !t.defined() || resident.place.holds(t);
  });
}

Sharing::Sharing(const Recording& settled) : inputs_(settled.inputs) {
  for (const Value& value : settled.graph.values()) {
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
