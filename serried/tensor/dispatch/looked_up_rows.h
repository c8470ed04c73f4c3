// Which rows of a table ranks look up, each in a batch of its own.
#pragma once

#include <ATen/core/Tensor.h>

#include "serried/mesh/mesh.h"

namespace serried::detail {

/// Of a table with `num_rows`: those that any rank of `mesh` has in its `rows`, each once. All these ranks call it.
at::Tensor rows_of_all_ranks(const at::Tensor& rows, int64_t num_rows, const DeviceMesh& mesh);

}  // namespace serried::detail
