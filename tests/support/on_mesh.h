// Runs a test body on thread ranks with a mesh, and compares what DTensors give with the unsharded op.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "serried/comm/groups/ranks.h"
#include "serried/mesh/mesh.h"
#include "serried/tensor/dtensor.h"

namespace serried::testing {

/// Runs `fn` on as many thread ranks as `shape` has, each with its own mesh of that shape.
void on_mesh(const Sizes& shape, const std::function<void(const DeviceMesh&)>& fn);

/// {1}, {2}, {3}, {4}, {2, 2}
std::vector<Sizes> usual_meshes();

/// Every list of placements over `mesh_ndim` axes made of Replicate, Shard of each dim of a tensor with `ndim` dims,
/// and Partial where `partial`.
std::vector<Placements> all_placements(int64_t ndim, size_t mesh_ndim, bool partial);

/// Every list of `num_axes` placements, each one of `options`; the last axis varies fastest.
std::vector<Placements> placement_lists(const Placements& options, size_t num_axes);

/// `full`, equal on all ranks, as a DTensor; a Partial is split unevenly with mixed signs.
DTensor place(const at::Tensor& full, const DeviceMesh& mesh, const Placements& placements);

/// The value of `t` on every rank; a plain tensor is itself.
at::Tensor full(const at::Tensor& t);

/// 0, 1, 2 and so on, in memory order.
at::Tensor iota(at::IntArrayRef sizes, at::ScalarType dtype = at::kDouble);

}  // namespace serried::testing
