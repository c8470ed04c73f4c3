// A DTensor is an ordinary TensorImpl: global sizes, no memory, our dispatch key, and this behind it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/TensorImpl.h>

#include <memory>

#include "serried/base/home_key.h"
#include "serried/tensor/spec.h"

namespace serried {

namespace detail {
struct CopiedFrom;
}
using CopiedFromPtr = std::shared_ptr<const detail::CopiedFrom>;

/// What strategy a tensor of ours follows: the fallback's first question.
enum class MetaKind : uint8_t { dtensor };

struct DistMeta : c10::BackendMeta {
  explicit DistMeta(MetaKind kind_) : kind(kind_) {}
  const MetaKind kind;
};

/// Never changed once a tensor has it: a tensor that changes gets a new one (set_meta), so copies that autograd makes
/// share it safely.
struct DTensorMeta final : DistMeta {
  DTensorMeta(at::Tensor local_, SpecPtr spec_, CopiedFromPtr copied_from_ = nullptr)
      : DistMeta(MetaKind::dtensor),
        local(std::move(local_)),
        spec(std::move(spec_)),
        copied_from(std::move(copied_from_)) {}
  c10::intrusive_ptr<c10::BackendMeta> clone(const c10::intrusive_ptr<c10::BackendMeta>& self) const override {
    return self;
  }

  const at::Tensor local;
  const SpecPtr spec;
  /// Of a view whose data had to be gathered, else null. It does not alias its base: writing through it raises, and so
  /// does its use after a write to the base.
  const CopiedFromPtr copied_from;
};

/// Null for a plain or undefined tensor.
inline const DTensorMeta* dtensor_meta(const c10::TensorImpl* impl) {
  if (!impl->key_set().has(kHomeKey)) return nullptr;
  auto* meta = static_cast<DistMeta*>(const_cast<c10::TensorImpl*>(impl)->get_backend_meta());
  return meta != nullptr && meta->kind == MetaKind::dtensor ? static_cast<const DTensorMeta*>(meta) : nullptr;
}
inline const DTensorMeta* dtensor_meta(const at::Tensor& t) {
  return dtensor_meta(t.unsafeGetTensorImpl());
}

/// A new tensor around `local`, which holds this rank's part as `spec` says. No checks, no gradient.
at::Tensor wrap(at::Tensor local, SpecPtr spec, CopiedFromPtr copied_from = nullptr);

/// The same for a view of `base`, one of ours. Under InferenceMode a view is an inference tensor only where its base
/// is.
at::Tensor wrap_view(at::Tensor local, SpecPtr spec, const at::Tensor& base, CopiedFromPtr copied_from = nullptr);

/// Gives an existing tensor of ours another part and spec; sizes and strides follow.
void set_meta(const at::Tensor& t, at::Tensor local, SpecPtr spec);

/// Turns a plain tensor into a DTensor in place: every handle on it (module members, optimizers) sees the DTensor.
void convert_in_place(const at::Tensor& plain, at::Tensor local, SpecPtr spec);

/// The spec that a local result lies by; sizes of -1 are taken from `local`.
SpecPtr spec_of_result(const at::Tensor& local, const DeviceMesh& mesh, const Placements& placements,
                       c10::IntArrayRef sizes);

}  // namespace serried
