// Micro-batches in rounds: within one, each stage of a rank takes all of them before the next stage does.
#pragma once

#include <cstdint>
#include <vector>

#include "serried/parallel/pipeline/table.h"

namespace serried::detail {

/// The order in which a rank's stages, called 0, 1, ..., come up.
struct RoundOrder {
  int64_t largest_round = 0;
  std::vector<int64_t> forwards;
  std::vector<int64_t> backwards;
};

RoundOrder round_order(const TableOptions& sizes);

}  // namespace serried::detail
