// The rows of a rule: for one mesh axis, every combination of placements that the op maps to itself locally.
#pragma once

#include <c10/util/SmallVector.h>

#include <string>
#include <vector>

#include "serried/spmd/bind.h"

namespace serried::spmd {

/// Placements of all inputs and outputs on one axis.
struct Row {
  c10::SmallVector<Placement, 4> inputs;
  c10::SmallVector<Placement, 2> outputs;
  int16_t factor = -1;  // the factor that is cut; -1: none
  bool operator==(const Row&) const = default;
};

/// Row 0 is all Replicate; then one per factor that can be cut, in order of first appearance; then those with Partial
/// inputs. Sizes are not looked at but for broadcasting: evenness is the planner's business.
std::vector<Row> rows(const Bound& bound);

/// "S0 R -> S0"
std::string to_string(const Row& row);

}  // namespace serried::spmd
