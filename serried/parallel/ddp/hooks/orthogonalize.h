// Orthonormal columns, computed alike on every rank.
#pragma once

#include <ATen/core/Tensor.h>

namespace serried::hooks::detail {

/// Makes the columns of each matrix of `matrices` [batch, rows, cols], cols <= rows, orthonormal, in place. They span
/// what they did before; a column that the ones before it already span is replaced. `epsilon` is added to each length
/// before a column is divided by it.
void orthogonalize(const at::Tensor& matrices, double epsilon);

}  // namespace serried::hooks::detail
