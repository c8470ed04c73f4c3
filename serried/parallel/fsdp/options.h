// Options of fully_shard.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <vector>

#include "serried/mesh/mesh.h"
#include "serried/parallel/mixed_precision.h"

namespace serried {

/// How a parameter is cut: a Shard; none: along dim 0.
using ShardPlacementFunction = std::function<std::optional<Placement>(const at::Tensor& parameter)>;

struct FullyShardOptions {
  std::optional<DeviceMesh> mesh = {};  // one axis, or two: (replicate, shard); none: all ranks of the current group
  /// Whether backward gathers again; none: yes, unless the module contains others that are sharded by themselves.
  std::optional<bool> reshard_after_forward = {};
  MixedPrecision mixed_precision = {};
  std::vector<at::Tensor> ignored_params = {};  // stay as they are, and nobody averages their gradients
  ShardPlacementFunction shard_placement_fn = {};
  /// Whether blocks are gathered ahead of their use, in the order of the last pass, and gradients are reduced while
  /// backward goes on; none: where this machine has two cores for each of its ranks.
  std::optional<bool> overlap = {};
};

}  // namespace serried
