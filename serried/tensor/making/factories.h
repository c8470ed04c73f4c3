// New DTensors: each rank allocates its part only.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Scalar.h>
#include <c10/core/TensorOptions.h>

#include "serried/tensor/dtensor.h"

namespace serried {

// No placements: replicated on every axis. Options are dtype, requires_grad and memory format; ValueError for another
// device or layout, and on a rank outside the mesh.
//     DTensor w = randn({8, 4}, mesh, {Shard(0)}, at::TensorOptions().requires_grad(true));

DTensor empty(at::IntArrayRef sizes, const DeviceMesh& mesh, const Placements& placements = {},
              at::TensorOptions options = {});
DTensor zeros(at::IntArrayRef sizes, const DeviceMesh& mesh, const Placements& placements = {},
              at::TensorOptions options = {});
/// With Partial(sum) the first rank of the axis holds ones and the others zeros: the tensor is ones.
DTensor ones(at::IntArrayRef sizes, const DeviceMesh& mesh, const Placements& placements = {},
             at::TensorOptions options = {});
/// Without a dtype that of torch::full: int64 for an integer, bool for a bool.
DTensor full(at::IntArrayRef sizes, const at::Scalar& fill, const DeviceMesh& mesh, const Placements& placements = {},
             at::TensorOptions options = {});

// The numbers that torch's function gives on one device for the same seed, bit for bit. ValueError for Partial.

DTensor rand(at::IntArrayRef sizes, const DeviceMesh& mesh, const Placements& placements = {},
             at::TensorOptions options = {});
DTensor randn(at::IntArrayRef sizes, const DeviceMesh& mesh, const Placements& placements = {},
              at::TensorOptions options = {});
/// Integers in [low, high); int64 without a dtype.
DTensor randint(int64_t low, int64_t high, at::IntArrayRef sizes, const DeviceMesh& mesh,
                const Placements& placements = {}, at::TensorOptions options = {});

// Each rank computes the whole, then keeps its part.

DTensor randperm(int64_t n, const DeviceMesh& mesh, const Placements& placements = {}, at::TensorOptions options = {});
DTensor arange(const at::Scalar& end, const DeviceMesh& mesh, const Placements& placements = {},
               at::TensorOptions options = {});
DTensor eye(int64_t n, const DeviceMesh& mesh, const Placements& placements = {}, at::TensorOptions options = {});

}  // namespace serried
