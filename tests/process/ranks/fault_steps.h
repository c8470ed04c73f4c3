// What a rank does over and over while a fault is put into one of the ranks.
#pragma once

#include <functional>
#include <stdexcept>
#include <string>

#include "serried/comm/groups/group.h"

namespace serried::testing {

/// A result that no fault may cause.
struct WrongResult : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// One call of a kind, the same number on every rank; throws WrongResult where a result is not what it must be.
using FaultStep = std::function<void(int number)>;

/// A step of the kind `call`, one of kFaultCalls, on the ranks of `group`. Tensors have about a MiB.
FaultStep make_fault_step(const std::string& call, const Group& group);

}  // namespace serried::testing
