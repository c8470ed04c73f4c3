// A DTensor is an ordinary TensorImpl: global sizes, no memory, our dispatch key, and this behind it.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "serried/tensor/kind.h"
#include "serried/tensor/spec.h"
#include "serried/tensor/use.h"

namespace serried {

namespace detail {
struct CopiedFrom;
}
using CopiedFromPtr = std::shared_ptr<const detail::CopiedFrom>;

/// Calls go by sharding rules; takes no other kind beside it.
extern const TensorKind kDTensor;

struct DTensorMeta final : DistMeta {
  DTensorMeta(at::Tensor local_, SpecPtr spec_, CopiedFromPtr copied_from_ = nullptr, UsePtr use_ = nullptr)
      : DistMeta(kDTensor),
        local(std::move(local_)),
        spec(std::move(spec_)),
        copied_from(std::move(copied_from_)),
        use(std::move(use_)) {}

  const at::Tensor local;
  const SpecPtr spec;
  /// Of a view whose data had to be gathered, else null. It does not alias its base: writing through it raises, and so
  /// does its use after a write to the base.
  const CopiedFromPtr copied_from;
  /// Of a parameter that a strategy has marked, else null.
  const UsePtr use;
};

/// Null for a plain or undefined tensor, and for one of another kind.
inline const DTensorMeta* dtensor_meta(const c10::TensorImpl* impl) {
  const DistMeta* meta = dist_meta(impl);
  return meta != nullptr && meta->kind == &kDTensor ? static_cast<const DTensorMeta*>(meta) : nullptr;
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

/// Marks a parameter, one of ours, for the ops that consume it; null takes the mark off.
void set_use(const at::Tensor& parameter, UsePtr use);

/// Turns a plain tensor into a DTensor in place: every handle on it (module members, optimizers) sees the DTensor.
void convert_in_place(const at::Tensor& plain, at::Tensor local, SpecPtr spec);

/// The spec that a local result lies by; sizes of -1 are taken from `local`.
SpecPtr spec_of_result(const at::Tensor& local, const DeviceMesh& mesh, const Placements& placements,
                       c10::IntArrayRef sizes);

}  // namespace serried
