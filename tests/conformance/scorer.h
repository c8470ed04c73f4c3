// Runs all chosen cases on rank threads and collects one outcome per case and combination.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tests/conformance/case_runner.h"

namespace serried::testing {

/// One call to make: a case of a file in one combination.
struct Trial {
  size_t file = 0;
  size_t index = 0;  // of the case
  Combination combination;
  Outcome outcome;  // of all ranks together, once run
};

struct ScoreOptions {
  Sizes mesh_shape = {4};
  size_t max_cases = SIZE_MAX;  // per file, spread over it
  bool plain = false;           // plain tensors instead of distributed ones: tests the scorer
};

struct Score {
  std::vector<VectorFile> files;
  std::vector<Trial> trials;       // in order of files, cases and combinations
  std::vector<std::string> local;  // cases that go by this machine's plain result, which is not the recorded one
};

/// Loads `names` from `folder` and runs every trial. A rank that fails ends the run of all ranks at that trial; the
/// next trial starts with new ranks and groups, so that no failure spoils its successors.
Score score(const std::vector<std::string>& names, const std::string& folder, const ScoreOptions& options);

/// "aten.mm.default 6ac8f8f4658e R,S0"
std::string describe(const Score& score, const Trial& trial);

}  // namespace serried::testing
