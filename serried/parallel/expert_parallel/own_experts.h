// Each rank has experts of its own: none may be taken for a copy of another rank's.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "serried/mesh/mesh.h"

namespace serried::detail {

/// ValueError where DistributedDataParallel averages `parameter`, of experts, with that of another rank of `mesh`.
void check_not_averaged(const char* where, const std::string& name, const at::Tensor& parameter,
                        const DeviceMesh& mesh);

/// ValueError where DistributedDataParallel or fully_shard make `parameter`, of an expert of this rank, one with that
/// of another rank of `mesh`: both start from the first rank's values, and average gradients. `name` is for the text.
void check_own(const char* where, const std::string& name, const at::Tensor& parameter, const DeviceMesh& mesh);

}  // namespace serried::detail
