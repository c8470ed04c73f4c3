// Whether all ranks wrapped the same model, and the state they start from.
#pragma once

#include <torch/nn/module.h>

#include <set>
#include <string>
#include <vector>

#include "serried/comm/groups/group.h"
#include "serried/parallel/ddp/parameters.h"

namespace serried::detail {

/// Compares names, sizes, strides and dtypes over the group; ValueError on every rank that names the first parameter
/// that differs, and two ranks with what they have.
void verify_same_parameters(const std::vector<ManagedParameter>& parameters, const Group& group);

/// All parameters (frozen ones too) and buffers that are not ignored.
std::vector<at::Tensor> module_state(const torch::nn::Module& module, const std::set<std::string>& ignored);

/// Gives `tensors` the values of rank `source`; autograd does not see it, version counters stay.
void broadcast_tensors(const std::vector<at::Tensor>& tensors, const Group& group, int source);

}  // namespace serried::detail
