// Makes tensors of ours, and makes tensors ours: the only file that touches TensorImpl's protected members.
#include "serried/tensor/meta.h"

#include <c10/core/AutogradState.h>
#include <c10/core/Storage.h>

#include <deque>

#include "serried/tensor/above_key.h"
#include "serried/tensor/gather_on_use.h"

namespace serried {
namespace {

// Names the protected members of TensorImpl; never instantiated. A pointer to member works on any TensorImpl.
struct OpenTensorImpl : c10::TensorImpl {
  static c10::DispatchKeySet& key_set(c10::TensorImpl& impl) { return impl.*(&OpenTensorImpl::key_set_); }
  static c10::Storage& storage(c10::TensorImpl& impl) { return impl.*(&OpenTensorImpl::storage_); }
  static caffe2::TypeMeta& dtype(c10::TensorImpl& impl) { return impl.*(&OpenTensorImpl::data_type_); }
};

// Without Dense: plain.set_data(dtensor) would be accepted silently with it.
constexpr c10::DispatchKeySet kHomeKeys =
    c10::DispatchKeySet(c10::BackendComponent::CPUBit) | c10::DispatchKeySet(kHomeKey);
constexpr c10::DispatchKeySet kKeys = kHomeKeys | c10::DispatchKeySet(c10::DispatchKey::AutogradCPU) |
                                      c10::DispatchKeySet(c10::DispatchKey::ADInplaceOrView) |
                                      c10::DispatchKeySet(c10::DispatchKey::AutocastCPU);

c10::Storage make_storage(const TensorKind& kind) {
  c10::Storage made(c10::Storage::use_byte_size_t(), 0, c10::GetAllocator(c10::kCPU), /*resizable=*/false);
  made.unsafeGetStorageImpl()->release_data_and_set_meta_custom_data_ptr_error_msg_(kind.no_memory);
  return made;
}

// One per kind and thread, so that ranks that are threads do not fight for one reference count. Few kinds: a list.
const c10::Storage& no_memory(const TensorKind& kind) {
  struct KindStorage {
    const TensorKind* kind;
    c10::Storage storage;
  };
  thread_local std::deque<KindStorage> storages;  // references stay good
  for (const KindStorage& each : storages) {
    if (each.kind == &kind) return each.storage;
  }
  return storages.emplace_back(KindStorage{&kind, make_storage(kind)}).storage;
}

// The same without a search: every result of an op needs it.
const c10::Storage& no_memory_of_dtensors() {
  thread_local const c10::Storage storage = make_storage(kDTensor);
  return storage;
}

void set_content(c10::TensorImpl& impl, c10::intrusive_ptr<DistMeta> meta, const TensorLooks& looks) {
  // Autograd would redo a view after a write by as_strided on memory that we do not have: it must call the view op. The
  // flag is asked after the view was made, so that the thread that meets its first DTensor here is in time.
  c10::AutogradState::get_tls_state().set_view_replay_enabled(true);
  impl.set_sizes_and_strides(looks.sizes, looks.strides, 0);
  impl.set_backend_meta(std::move(meta));
}

// What a spec says of a tensor's looks. Of the meta's own: it lives as long as the tensor.
void set_content(c10::TensorImpl& impl, c10::intrusive_ptr<DTensorMeta> meta) {
  const Spec& spec = *meta->spec;
  set_content(impl, std::move(meta), {spec.sizes, spec.strides, spec.dtype});
}

}  // namespace

at::Tensor make_tensor(c10::intrusive_ptr<DistMeta> meta, const TensorLooks& looks, const c10::TensorImpl* view_of) {
  const caffe2::TypeMeta dtype = c10::scalarTypeToTypeMeta(looks.dtype);
  c10::Storage storage(no_memory(*meta->kind));
  auto impl = view_of == nullptr ? c10::make_intrusive<c10::TensorImpl>(std::move(storage), kKeys, dtype)
                                 : c10::make_intrusive<c10::TensorImpl>(c10::TensorImpl::VIEW, std::move(storage),
                                                                        view_of->key_set().remove(kAboveKey), dtype);
  set_content(*impl, std::move(meta), looks);
  return at::Tensor(std::move(impl));
}

at::Tensor wrap(at::Tensor local, SpecPtr spec, CopiedFromPtr copied_from) {
  // The constructor leaves out autograd's keys under InferenceMode.
  auto impl = c10::make_intrusive<c10::TensorImpl>(c10::Storage(no_memory_of_dtensors()), kKeys,
                                                   c10::scalarTypeToTypeMeta(spec->dtype));
  set_content(*impl, c10::make_intrusive<DTensorMeta>(std::move(local), std::move(spec), std::move(copied_from)));
  return at::Tensor(std::move(impl));
}

at::Tensor wrap_view(at::Tensor local, SpecPtr spec, const at::Tensor& base, CopiedFromPtr copied_from) {
  auto impl =
      c10::make_intrusive<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(no_memory_of_dtensors()),
                                           base.key_set().remove(kAboveKey), c10::scalarTypeToTypeMeta(spec->dtype));
  set_content(*impl, c10::make_intrusive<DTensorMeta>(std::move(local), std::move(spec), std::move(copied_from)));
  return at::Tensor(std::move(impl));
}

void set_meta(const at::Tensor& t, at::Tensor local, SpecPtr spec) {
  c10::TensorImpl& impl = *t.unsafeGetTensorImpl();
  OpenTensorImpl::dtype(impl) = c10::scalarTypeToTypeMeta(spec->dtype);
  const DTensorMeta* old = dtensor_meta(t);
  CopiedFromPtr copied_from = old != nullptr ? old->copied_from : nullptr;
  UsePtr use = old != nullptr ? old->use : nullptr;
  set_content(impl, c10::make_intrusive<DTensorMeta>(std::move(local), std::move(spec), std::move(copied_from),
                                                     std::move(use)));
}

void set_use(const at::Tensor& parameter, UsePtr use) {
  c10::TensorImpl& impl = *parameter.unsafeGetTensorImpl();
  const bool has_other_dtype = use != nullptr && use->gather != nullptr && use->gather->other_dtype().has_value();
  const bool is_marked = has_other_dtype || (use != nullptr && use->layouts != nullptr);
  c10::DispatchKeySet& keys = OpenTensorImpl::key_set(impl);
  keys = is_marked ? keys.add(kAboveKey) : keys.remove(kAboveKey);
  if (const DTensorMeta* old = dtensor_meta(parameter)) {
    impl.set_backend_meta(c10::make_intrusive<DTensorMeta>(old->local, old->spec, old->copied_from, std::move(use)));
    return;
  }
  const auto& old = static_cast<const detail::LazyViewMeta&>(*dist_meta(&impl));
  impl.set_backend_meta(c10::make_intrusive<detail::LazyViewMeta>(old.base, old.offset, old.step, std::move(use)));
}

void convert_in_place(const at::Tensor& plain, at::Tensor local, SpecPtr spec) {
  c10::TensorImpl& impl = *plain.unsafeGetTensorImpl();
  OpenTensorImpl::key_set(impl) =
      plain.is_inference() ? kHomeKeys | c10::DispatchKeySet(c10::DispatchKey::AutocastCPU) : kKeys;
  OpenTensorImpl::storage(impl) = no_memory_of_dtensors();
  OpenTensorImpl::dtype(impl) = c10::scalarTypeToTypeMeta(spec->dtype);
  set_content(impl, c10::make_intrusive<DTensorMeta>(std::move(local), std::move(spec)));
}

SpecPtr spec_of_result(const at::Tensor& local, const DeviceMesh& mesh, const Placements& placements,
                       c10::IntArrayRef sizes) {
  c10::DimVector global(local.sizes());
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] >= 0) global[i] = sizes[i];
  }
  const c10::DimVector strides =
      local.is_contiguous() ? serried::contiguous_strides(global) : dense_strides(global, local.strides());
  return intern_spec(mesh, placements, global, strides, local.scalar_type());
}

}  // namespace serried
