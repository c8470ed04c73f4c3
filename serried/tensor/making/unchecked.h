// Making DTensors of parts and of wholes, without the checks for users.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>

#include "serried/mesh/mesh.h"
#include "serried/tensor/spec.h"

namespace serried::detail {

/// `data`, which is `local` or the same after communication, as its part of what `spec` says; a function of `local` to
/// autograd. The gradient comes back in `grad_placements`.
at::Tensor from_local_unchecked(const at::Tensor& local, const at::Tensor& data, const SpecPtr& spec,
                                const Placements& grad_placements);

/// All ranks' parts compared over the mesh: dtype, requires_grad, and sizes against what the placements give. Returns
/// the global sizes, `given` or else found by adding up the parts. ValueError that names the first rank that differs.
c10::DimVector agreed_sizes(std::string_view where, const at::Tensor& local, const DeviceMesh& mesh,
                            const Placements& placements, const std::optional<Sizes>& given);

/// `placements` are resolved. Contiguous, on memory of its own; no gradients.
at::Tensor distributed_part(std::string_view where, const at::Tensor& full, const DeviceMesh& mesh,
                            const Placements& placements, std::optional<int> source);

}  // namespace serried::detail
