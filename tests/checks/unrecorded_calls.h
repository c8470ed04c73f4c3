// Calls of ops that the conformance vectors do not have, as examples of rules that go by shapes.
#pragma once

#include <string>

#include "tests/support/sample_call.h"

namespace serried::testing {

/// A call of the op that a line of a rule table names; null where there is none.
const SampleCall* unrecorded(const std::string& name);

}  // namespace serried::testing
