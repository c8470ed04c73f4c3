// Parameters that are DTensors, of tensor parallelism inside data parallelism: buckets hold this rank's part of them.
#pragma once

#include <vector>

#include "serried/mesh/mesh.h"
#include "serried/parallel/ddp/parameters.h"
#include "serried/tensor/parts.h"

namespace serried::detail {

/// The same parameters with their parts for tensors.
std::vector<ManagedParameter> parts_of(std::vector<ManagedParameter> parameters);

/// ValueError for a parameter that is distributed over ranks of `mesh` already: they would average parts of a whole.
void check_apart(const std::vector<ManagedParameter>& parameters, const DeviceMesh& mesh);

/// This rank's part of a gradient, which is placed as `parameter` is first.
at::Tensor gradient_part(const at::Tensor& grad, const at::Tensor& parameter);

/// `part` as the gradient of `parameter`: itself, or the DTensor it is a part of.
at::Tensor as_gradient(const at::Tensor& part, const at::Tensor& parameter);

}  // namespace serried::detail
