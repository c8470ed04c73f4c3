// Proof of rules by brute force: every row on fake ranks against the op on whole tensors.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <string>
#include <vector>

#include "serried/spmd/rows.h"
#include "tests/support/fake_ranks.h"

namespace serried::testing {

struct VerifyOptions {
  Split split = Split::independent;
  int max_pairs = 0;  // of rows on a 2x2 mesh
};

/// What was checked, and each row or pair that gave another result than the whole op.
struct Verdict {
  int rules = 0;
  int rows = 0;
  int pairs = 0;
  int unchecked = 0;  // rows of which no part count or dtype of the sample allows a check
  std::vector<std::string> wrong;
  void add(const Verdict& other);
};

/// Rows of `rule` for a call of `op`, each on 2 and on 3 ranks, uneven where the row allows it; then pairs of rows.
/// Arguments are not changed.
Verdict verify_rule(const c10::OperatorHandle& op, const torch::jit::Stack& arguments, const spmd::Rule& rule,
                    const VerifyOptions& options = {});

}  // namespace serried::testing
