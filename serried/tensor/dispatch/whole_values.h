// The short way for ops on parameters that are gathered on use, beside plain tensors.
#pragma once

#include <c10/core/DispatchKeySet.h>
#include <c10/util/SmallVector.h>

#include <utility>

#include "serried/tensor/dispatch/arguments.h"

namespace serried::detail {

/// Other work between autograd and the kernel: a tensor with one of these keys has to go through the dispatcher.
inline constexpr c10::DispatchKeySet kNeedsMore({c10::DispatchKey::Conjugate, c10::DispatchKey::Negative,
                                                 c10::DispatchKey::ZeroTensor, c10::DispatchKey::Python});

/// What stands in for the parameters of a call, and for views of them.
class WholeValues {
 public:
  /// For a call that writes nothing and makes no view. False: it has to go the long way.
  bool find(const Arguments& arguments);

  /// What to compute with in place of `t`.
  const at::Tensor& of(const at::Tensor& t) const {
    for (const auto& [given, value] : values_) {
      if (given == t.unsafeGetTensorImpl()) return value;
    }
    return t;
  }

 private:
  c10::SmallVector<std::pair<const c10::TensorImpl*, at::Tensor>, 2> values_;
};

}  // namespace serried::detail
