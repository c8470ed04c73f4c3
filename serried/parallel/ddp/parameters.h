// The parameters whose gradients are averaged: which, in what order, and what to call them.
#pragma once

#include <torch/nn/module.h>

#include <set>
#include <string>
#include <vector>

namespace serried::detail {

struct ManagedParameter {
  at::Tensor tensor;
  std::string name;    // "blocks.0.fc.weight"
  std::string module;  // the module that owns it: "blocks.0.fc (torch::nn::LinearImpl)"
  bool sparse_gradient = false;
};

/// Depth first, own parameters of a module before its children's; those that require gradients and are not ignored,
/// shared ones once. ValueError for a parameter that has no memory yet, or for parameters on several kinds of devices.
std::vector<ManagedParameter> collect_parameters(const torch::nn::Module& module, const std::set<std::string>& ignored);

/// ValueError that names the first of `names` that is neither a parameter nor a buffer of `module`.
void check_names_exist(const torch::nn::Module& module, const std::vector<std::string>& names);

}  // namespace serried::detail
