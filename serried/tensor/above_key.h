// The dispatch key that leads ops to serried before autograd sees them.
#pragma once

#include <c10/core/DispatchKey.h>

namespace serried {

/// Carried by parameters that ask layouts of the ops that consume them (above.h), and by their transposes; by those
/// that compute in another dtype than their own (cast_inputs.h), and by their views; by nothing else. Above
/// autograd and autocast. Nothing in LibTorch 2.13 uses it; a start-up check says so if that ever changes.
inline constexpr c10::DispatchKey kAboveKey = c10::DispatchKey::DeferredInit;

}  // namespace serried
