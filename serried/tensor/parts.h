// What plain code sees of a tensor: of a DTensor this rank's part.
#pragma once

#include <ATen/core/Tensor.h>

#include "serried/tensor/meta.h"

namespace serried {

/// What this rank holds of `t`: a plain tensor is all there. Undefined where `t` is.
inline at::Tensor part_of(const at::Tensor& t) {
  const DTensorMeta* dtensor = t.defined() ? dtensor_meta(t) : nullptr;
  return dtensor != nullptr ? dtensor->local : t;
}

/// Null where `t` is plain or undefined.
inline SpecPtr spec_of(const at::Tensor& t) {
  const DTensorMeta* dtensor = t.defined() ? dtensor_meta(t) : nullptr;
  return dtensor != nullptr ? dtensor->spec : SpecPtr();
}

}  // namespace serried
