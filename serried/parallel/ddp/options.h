// Options of DistributedDataParallel.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <optional>
#include <string>
#include <vector>

#include "serried/comm/groups/group.h"
#include "serried/mesh/mesh.h"
#include "serried/parallel/mixed_precision.h"

namespace serried {

/// Parameters that stay out of the buckets: their gradients are reduced as one, when `trigger`'s gradient is there.
struct DelayedAllReduce {
  std::vector<std::string> parameters = {};
  std::string trigger = {};
};

struct DistributedDataParallelOptions {
  Group process_group = {};                  // none: the mesh's, or else the current group
  std::optional<DeviceMesh> mesh = {};       // one axis; instead of a group
  std::optional<double> bucket_cap_mb = {};  // MiB; none: 25, with a small first bucket of 1
  std::vector<double> bucket_caps_mb = {};   // one per bucket, the last repeats; instead of bucket_cap_mb
  bool find_unused_parameters = false;
  bool gradient_as_bucket_view = true;    // .grad lies in the bucket: no second copy of the gradients
  bool static_graph = false;              // every iteration uses the same parameters, equally often
  bool sync_buffers = true;               // rank 0's buffers before every synchronised forward
  bool init_sync = true;                  // compare shapes and broadcast rank 0's state at construction
  std::vector<std::string> ignore = {};   // names of parameters and buffers that are left alone
  std::optional<at::Device> device = {};  // inputs are moved here before forward
  bool skip_unused_allreduce = false;     // unused parameters are not reduced; they must be the same on every rank
  bool batched_grad_copy = false;         // gradients are copied into the bucket all at once, when it is full
  DelayedAllReduce delay_all_reduce = {};
  MixedPrecision mixed_precision = {};
  int stats_every = 100;  // iterations between two samples of run-time statistics, after the first 10
};

using DDPOptions = DistributedDataParallelOptions;

}  // namespace serried
