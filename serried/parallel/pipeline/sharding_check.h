// Checks of the actions that gather, give up and reduce what a stage's data-parallel ranks share.
#pragma once

#include <cstdint>
#include <vector>

#include "serried/parallel/pipeline/table.h"

namespace serried::detail {

/// ValueError unless UNSHARD, RESHARD and REDUCE_GRAD make sense: on the rank of their stage; a stage that is unsharded
/// by the table computes only while it is; gradients are reduced once, when they are complete.
void check_sharding_actions(const std::vector<PipelineTable::Row>& rows, const std::vector<int64_t>& rank_of_stage);

}  // namespace serried::detail
