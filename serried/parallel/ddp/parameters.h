// The parameters whose gradients are averaged: which, in what order, what to call them, and what of them this rank
// holds.
#pragma once

#include <torch/nn/module.h>

#include <set>
#include <string>
#include <vector>

#include "serried/mesh/mesh.h"
#include "serried/tensor/parts.h"

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

// A parameter may be a DTensor, of tensor parallelism inside data parallelism: buckets hold this rank's part of it.

/// The same parameters with their parts for tensors.
std::vector<ManagedParameter> parts_of(std::vector<ManagedParameter> parameters);

/// Whether a rank other than this one is in both.
bool share_other_ranks(const DeviceMesh& a, const DeviceMesh& b);

/// ValueError for a parameter that is distributed over ranks of `mesh` already: they would average parts of a whole.
void check_apart(const std::vector<ManagedParameter>& parameters, const DeviceMesh& mesh);

/// This rank's part of a gradient, which is placed as `parameter` is first.
at::Tensor gradient_part(const at::Tensor& grad, const at::Tensor& parameter);

/// `part` as the gradient of `parameter`: itself, or the DTensor it is a part of.
at::Tensor as_gradient(const at::Tensor& part, const at::Tensor& parameter);

}  // namespace serried::detail
