// A tensor that somebody else owns: seen as long as it lives.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/UndefinedTensorImpl.h>

namespace serried {

class WeakTensor {
 public:
  WeakTensor(const at::Tensor& t) : weak_(t.getIntrusivePtr()) {}  // NOLINT: as weak_ptr does

  /// Undefined when it is gone, or was from the beginning.
  at::Tensor lock() const {
    auto impl = weak_.lock();
    return impl ? at::Tensor(std::move(impl)) : at::Tensor();
  }
  /// Of all who own it.
  size_t num_handles() const { return weak_.use_count(); }
  const c10::TensorImpl* address() const { return weak_._unsafe_get_target(); }

 private:
  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> weak_;
};

}  // namespace serried
