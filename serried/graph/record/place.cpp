// Reads tensors as they are, without an op.
#include "serried/graph/record/place.h"

#include <torch/csrc/autograd/variable.h>

#include "serried/tensor/parts.h"

namespace serried::graph {
namespace {

const c10::TensorImpl* part_impl(const at::Tensor& t) {
  const c10::TensorImpl* impl = t.unsafeGetTensorImpl();
  const DTensorMeta* dtensor = dtensor_meta(impl);
  return dtensor != nullptr ? dtensor->local.unsafeGetTensorImpl() : impl;
}

c10::intrusive_ptr<c10::StorageImpl> owned_storage(const at::Tensor& part) {
  if (!part.defined() || !part.has_storage()) return {};
  return c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(part.storage().unsafeGetStorageImpl());
}

const char* begin_of(const c10::StorageImpl& storage) {
  return static_cast<const char*>(storage.data());
}

}  // namespace

const c10::StorageImpl* storage_of(const at::Tensor& t) {
  if (!t.defined()) return nullptr;
  const c10::TensorImpl* impl = part_impl(t);
  return impl->has_storage() ? impl->unsafe_storage().unsafeGetStorageImpl() : nullptr;
}

bool owns_storage(const at::Tensor& t) {
  return t.storage().nbytes() == t.nbytes();
}

int64_t byte_offset_of(const at::Tensor& t) {
  const c10::TensorImpl* impl = part_impl(t);
  return impl->has_storage() ? impl->storage_offset() * int64_t(impl->itemsize()) : 0;
}

Place place_of(const at::Tensor& t) {
  const DTensorMeta* dtensor = dtensor_meta(t);
  const at::Tensor& part = dtensor != nullptr ? dtensor->local : t;
  return {dtensor != nullptr ? part.unsafeGetTensorImpl() : nullptr, storage_of(t), meta_of(part)};
}

bool Place::holds(const at::Tensor& t) const {
  const DTensorMeta* dtensor = dtensor_meta(t);
  const at::Tensor& now = dtensor != nullptr ? dtensor->local : t;
  if ((dtensor != nullptr ? now.unsafeGetTensorImpl() : nullptr) != part || storage_of(now) != storage) return false;
  if (now.scalar_type() != meta.dtype || now.sizes() != c10::IntArrayRef(meta.sizes)) return false;
  if (now.layout() != at::kStrided) return true;
  return now.strides() == c10::IntArrayRef(meta.strides) && (!now.has_storage() || now.storage_offset() == meta.offset);
}

WeakHistory history_of(const at::Tensor& t) {
  const auto* meta = t.defined() ? torch::autograd::impl::get_autograd_meta(t) : nullptr;
  return WeakHistory(meta != nullptr ? meta->grad_fn_ : c10::intrusive_ptr<torch::autograd::Node>());
}

bool has_history(const at::Tensor& t, const WeakHistory& history) {
  const auto* meta = torch::autograd::impl::get_autograd_meta(t);
  return (meta != nullptr ? meta->grad_fn_.get() : nullptr) == history._unsafe_get_target();
}

InputPlace::InputPlace(const at::Tensor& t)
    : was_defined(t.defined()),
      part(part_of(t)),
      storage(owned_storage(part_of(t))),
      offset(t.defined() ? byte_offset_of(t) : 0) {}

bool InputPlace::allows(const at::Tensor& t) const {
  if (!was_defined || any_storage) return true;
  if (storage_of(t) != storage._unsafe_get_target() || storage.expired()) return false;
  if (!any_offset && byte_offset_of(t) != offset) return false;
  return any_tensor || part_impl(t) == part.address();
}

bool is_allocated(const c10::StorageImpl& storage) {
  return storage.nbytes() == 0 || storage.data_ptr().get_context() == storage.data();
}

bool overlap(const c10::StorageImpl& a, const c10::StorageImpl& b) {
  if (&a == &b) return true;
  if (is_allocated(a) && is_allocated(b)) return false;
  if (a.device() != b.device() || a.nbytes() == 0 || b.nbytes() == 0) return false;
  return begin_of(a) < begin_of(b) + b.nbytes() && begin_of(b) < begin_of(a) + a.nbytes();
}

}  // namespace serried::graph
