// Whether a result is the recorded one, within what another order of summation may change.
#pragma once

#include <ATen/core/ivalue.h>

#include <string>
#include <vector>

namespace serried::testing {

/// Empty where they agree, else what differs. Integers and bools are equal; floating and complex numbers differ by at
/// most 1e-5 * max(1, largest finite |want|) + 1e-4 * |want|; nan equals nan. Strides are not compared.
std::string difference(const c10::IValue& got, const c10::IValue& want);

/// The same for all results of a call. An op that returns nothing has no results or one None.
std::string difference(c10::ArrayRef<c10::IValue> got, const std::vector<c10::IValue>& want);

}  // namespace serried::testing
