// Work on plain tensors inside an op of a DTensor.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <optional>

#include "serried/tensor/meta.h"

namespace serried::detail {

/// While alive ops of this thread record no gradients and never make DTensors, not even inside BornSharded. DTensors
/// cannot be used then. A recorder goes on seeing the ops.
class LocalOnly {
 public:
  LocalOnly();
  ~LocalOnly();
  LocalOnly(const LocalOnly&) = delete;
  LocalOnly& operator=(const LocalOnly&) = delete;

 private:
  at::AutoDispatchBelowADInplaceOrView below_autograd_;
  std::optional<c10::impl::ExcludeDispatchKeyGuard> below_home_;
  bool was_local_only_;
};

bool is_local_only();

}  // namespace serried::detail
