// Work on plain tensors inside an op of a DTensor.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "serried/tensor/meta.h"

namespace serried::detail {

/// While alive ops of this thread record no gradients and never make DTensors, not even inside BornSharded. DTensors
/// cannot be used then.
class LocalOnly {
 private:
  at::AutoDispatchBelowADInplaceOrView below_autograd_;
  c10::impl::ExcludeDispatchKeyGuard below_home_{c10::DispatchKeySet(kHomeKey)};
};

}  // namespace serried::detail
