// Stock torch::nn modules on a mesh: their parameters become DTensors in place.
#pragma once

#include <torch/nn/module.h>

#include <functional>
#include <string>

#include "serried/tensor/dtensor.h"

namespace serried {

/// Makes `parameter` (or a buffer) a DTensor in place: the module's member, its parameter list and an optimizer made
/// earlier all see it. The values of the mesh's first rank count; all ranks of the mesh call it. Its gradient arrives
/// in the same placements. Nothing happens where it lies so already; ValueError where it lies otherwise.
///     distribute_parameter(net->fc1->weight, mesh, {Shard(0), Replicate()});
void distribute_parameter(const at::Tensor& parameter, const DeviceMesh& mesh, const Placements& placements = {});

/// Called for every submodule, the module itself first under the name "".
using PartitionFn = std::function<void(const std::string& name, torch::nn::Module& module, const DeviceMesh& mesh)>;

/// Calls `partition` for every submodule; then parameters and buffers that are still plain become Replicate. ValueError
/// for a module that went through it already.
void distribute_module(torch::nn::Module& module, const DeviceMesh& mesh, const PartitionFn& partition = {});

}  // namespace serried
