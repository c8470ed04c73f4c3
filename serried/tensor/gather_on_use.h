// A DTensor that is whole only while an op needs it: what stands behind ParameterUse::gather, and views of it.
#pragma once

#include <optional>

#include "serried/tensor/meta.h"

namespace serried {

/// Calls on DTensors with `use->gather`. Among their like (parameters, gradients, optimizer state) they go by rules, on
/// the parts; beside anything else the whole value stands in for the tensor, and its views wait until an op reads them.
/// No meta has this kind: kind_of_call answers with it.
extern const TensorKind kGathered;

/// A view of such a parameter: sizes, strides and an offset into its whole value; no memory.
extern const TensorKind kLazyView;

namespace detail {

/// What a strategy knows of a tensor that it cuts over ranks that all compute with it. To these ranks it is one value.
struct GatherOnUse {
  virtual ~GatherOnUse() = default;
  /// The value that ops compute with, over all ranks that share it: a plain tensor, or a DTensor of the axes that are
  /// left. Nobody writes to it, nor keeps it longer than for an op. All these ranks call it.
  virtual at::Tensor whole(const DTensorMeta& meta) = 0;
  /// A copy of that in the tensor's own dtype, for an op that writes to it or beside it.
  virtual at::Tensor whole_to_write(const DTensorMeta& meta) { return whole(meta).clone(); }
  /// This rank's part of what whole() gives, on the memory of `whole`.
  virtual at::Tensor part_of_whole(const DTensorMeta& meta, const at::Tensor& whole) = 0;
  /// False for gradients and optimizer state.
  virtual bool is_parameter() const { return false; }
  /// An op that autograd may have recorded takes the tensor.
  virtual void note_use() {}
  /// An op has written the part.
  virtual void note_write() {}
  /// Whose version tells of writes to the part, by whatever name it was written; undefined: that of the name.
  virtual at::Tensor parameter() const { return {}; }
  /// That ops compute in where it is not the tensor's own.
  virtual std::optional<at::ScalarType> other_dtype() const { return std::nullopt; }
  /// Whether inputs are cast to that where they meet it.
  virtual bool casts_inputs() const { return false; }

  at::Tensor ghost;  // of a parameter: the whole value without memory; made with its first view
};

inline GatherOnUse* gather_of(const DTensorMeta& meta) {
  return meta.use != nullptr ? meta.use->gather.get() : nullptr;
}
inline GatherOnUse* gather_of(const at::Tensor& t) {
  const DTensorMeta* meta = t.defined() ? dtensor_meta(t) : nullptr;
  return meta != nullptr ? gather_of(*meta) : nullptr;
}

/// Whether calls on the tensor must be looked at before they go by rules. What optimizers do to gradients and state
/// need not be.
bool leaves_fast_path(const DTensorMeta& meta);

/// For gradients and state of parameters that are gathered on use: where one meets a plain tensor, it is gathered, too.
const UsePtr& use_like_parameters();

struct LazyViewStep;

struct LazyViewMeta final : DistMeta {
  LazyViewMeta(c10::intrusive_ptr<DTensorMeta> base_, int64_t offset_, std::shared_ptr<const LazyViewStep> step_,
               UsePtr use_ = nullptr)
      : DistMeta(kLazyView), base(std::move(base_)), offset(offset_), step(std::move(step_)), use(std::move(use_)) {}

  const c10::intrusive_ptr<DTensorMeta> base;      // of the parameter
  const int64_t offset;                            // in elements
  const std::shared_ptr<const LazyViewStep> step;  // how it was made; null where sizes, strides and offset tell all
  const UsePtr use;  // of the transpose of a marked matrix, and of what computes in another dtype
};

/// How a parameter, or a lazy view of one, is used; null for all other tensors.
inline const ParameterUse* use_of(const at::Tensor& t) {
  const DistMeta* meta = t.defined() ? dist_meta(t.unsafeGetTensorImpl()) : nullptr;
  if (meta == nullptr) return nullptr;
  if (meta->kind == &kDTensor) return static_cast<const DTensorMeta*>(meta)->use.get();
  return meta->kind == &kLazyView ? static_cast<const LazyViewMeta*>(meta)->use.get() : nullptr;
}

}  // namespace detail
}  // namespace serried
