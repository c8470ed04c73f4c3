// Where the data of a tensor lies: to tell whether it lies there still, and who else has the memory.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>

#include "serried/graph/graph.h"
#include "serried/tensor/weak_tensor.h"

namespace serried::graph {

/// Of a DTensor that of its part.
struct Place {
  const c10::TensorImpl* part = nullptr;  // of a DTensor
  const c10::StorageImpl* storage = nullptr;
  TensorMeta meta = {};

  bool holds(const at::Tensor& t) const;
};
Place place_of(const at::Tensor& t);

/// The node of autograd that made a tensor; of a leaf none.
using WeakHistory = c10::weak_intrusive_ptr<torch::autograd::Node>;
WeakHistory history_of(const at::Tensor& t);
bool has_history(const at::Tensor& t, const WeakHistory& history);

/// An input of a recording, and what else it may be: what differed between recordings that agree.
struct InputPlace {
  explicit InputPlace(const at::Tensor& t);

  bool was_defined;
  WeakTensor part;  // of a DTensor, else the tensor
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  int64_t offset;  // in bytes
  bool any_storage = false;
  bool any_offset = false;
  bool any_tensor = false;

  /// Whether `t` is one of those.
  bool allows(const at::Tensor& t) const;
};

/// Null where `t` is undefined or has none; of a DTensor that of its part.
const c10::StorageImpl* storage_of(const at::Tensor& t);
/// Whether `t`, which is dense, is all of its storage: no view of a bucket.
bool owns_storage(const at::Tensor& t);
/// In bytes, from the begin of its storage.
int64_t byte_offset_of(const at::Tensor& t);

/// How often autograd saw it written, with all its aliases; inference tensors are not counted.
inline uint32_t version_of(const at::Tensor& t) {
  return t.is_inference() ? 0 : uint32_t(t._version());
}

/// Whether the memory is that of an allocator: no other storage has a part of it. That of from_blob() may be anybody's.
bool is_allocated(const c10::StorageImpl& storage);
/// Whether two storages are the same memory or overlap.
bool overlap(const c10::StorageImpl& a, const c10::StorageImpl& b);

}  // namespace serried::graph
