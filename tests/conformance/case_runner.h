// Runs one recorded call on one rank with its arguments distributed, and says what came of it.
#pragma once

#include <string>

#include "serried/mesh/mesh.h"
#include "tests/conformance/combinations.h"

namespace serried::testing {

enum class Status : uint8_t { right, raises, wrong };

/// What one rank saw, or all of them together.
struct Outcome {
  Status status = Status::right;
  bool took_default = false;  // the call took the replicate default
  std::string text;           // the error's first lines, or what differs
};

/// How arguments are laid: on `mesh`, or not at all (plain tensors, to test the scorer itself).
struct RankSetting {
  const DeviceMesh* mesh = nullptr;
};

/// Calls the op with fresh inputs laid as `combination` says, gradients off, and compares all results and all written
/// arguments with the recorded ones. Never throws. All ranks of the mesh call it.
Outcome run_case(const c10::OperatorHandle& op, const VectorCase& vector_case, const Combination& combination,
                 const RankSetting& setting);

/// Calls the op with plain tensors. Where LibTorch on this processor gives something else than was recorded (the sign
/// of a singular vector), that becomes what the case expects. True where it did.
bool expect_plain_result(const c10::OperatorHandle& op, VectorCase& vector_case);

}  // namespace serried::testing
