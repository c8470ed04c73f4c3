// What users may put in place of the collectives of a block, or behind them.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

#include "serried/comm/groups/group.h"

namespace c10d {
struct ReduceOp;
}

namespace serried {

/// Gathers `mine`, one flat buffer of equal length on each rank, into `all`, in the order of the ranks.
using AllGatherHook = std::function<void(const at::Tensor& all, const at::Tensor& mine, const Group& group)>;

/// Reduces `all`, the flat gradients for each rank in a row, and puts this rank's part into `mine`.
using ReduceScatterHook =
    std::function<void(const at::Tensor& mine, const at::Tensor& all, const Group& group, const c10d::ReduceOp& op)>;

/// Gets this rank's part of the reduced gradients, flat, and may change it before the parameters get it. `group`: those
/// that hold other parts. Between the parts of two parameters there may be padding, which means nothing.
using ReducedGradientHook = std::function<void(const at::Tensor& reduced, const Group& group)>;

struct FullyShardHooks {
  AllGatherHook all_gather = {};
  ReduceScatterHook reduce_scatter = {};
  ReducedGradientHook reduced = {};
};

}  // namespace serried
