// The dispatch key that leads ops to serried.
#pragma once

#include <c10/core/DispatchKey.h>

namespace serried {

/// The key whose one boxed fallback (tensor/dispatch) sees every op on our tensors, and every op of a recorded thread:
/// below autograd, above all backends, in no composite alias set. Nothing else in LibTorch 2.13 uses it; a start-up
/// check says so if that ever changes.
inline constexpr c10::DispatchKey kHomeKey = c10::DispatchKey::Fake;

}  // namespace serried
