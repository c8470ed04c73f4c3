// Executes redistributions on local tensors: no gradients, no checks.
#pragma once

#include <ATen/core/Tensor.h>

#include "serried/spmd/redistribute.h"
#include "serried/tensor/spec.h"

namespace serried {

/// The steps between two specs of one mesh and the same sizes, kept once computed (per thread).
const std::vector<spmd::Step>& redistribution(const Spec& from, const Placements& to);

/// This rank's part after `steps`; `local` itself where there are none. All ranks of the axes involved call it.
/// The result is contiguous unless it is `local`.
at::Tensor run_steps(const at::Tensor& local, const Spec& from, const std::vector<spmd::Step>& steps);

/// Both at once.
at::Tensor redistribute_local(const at::Tensor& local, const Spec& from, const Placements& to);

/// From one mesh to another of the same root group, by chunk intersection; ranks of both meshes call it. Undefined
/// where this rank is not in `to`.
at::Tensor redistribute_across(const at::Tensor& local, const Spec& from, const DeviceMesh& mesh, const Placements& to);

/// The reduction's neutral element as a tensor like `t`: zeros for sum, the lowest value for max, ...
at::Tensor identity_like(const at::Tensor& t, ReduceKind kind);
/// Fills `t` with it.
void fill_identity_(const at::Tensor& t, ReduceKind kind);

}  // namespace serried
