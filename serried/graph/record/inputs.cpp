// Compares storages, and where torch does not own the memory its bounds.
#include "serried/graph/record/inputs.h"

#include <algorithm>

namespace serried::graph {
namespace {

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
  return std::any_of(recording.outer_tensors.begin(), recording.outer_tensors.end(), [&](const OuterTensor& outer) {
    return outer.is_of_surroundings() && outer.is_lasting && input.was_defined &&
           outer.place.storage == input.storage._unsafe_get_target();
  });
}

}  // namespace

bool is_from_outside(const Value& value) {
  return value.kind == ValueKind::persistent && value.tensor.defined() && value.tensor.has_storage();
}

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
  return std::all_of(recording.outer_tensors.begin(), recording.outer_tensors.end(), [](const OuterTensor& outer) {
    const at::Tensor t = outer.tensor.lock();
    return !outer.is_of_surroundings() || !t.defined() || outer.place.holds(t);
  });
}

}  // namespace serried::graph
