// Reductions of Partial placements: which c10d op they are, for which dtype, over several axes at once.
#pragma once

#include <ATen/core/Tensor.h>

#include "serried/comm/collectives/ops.h"
#include "serried/spmd/redistribute.h"

namespace serried::detail {

/// What a backend is asked for, and what is left to do afterwards.
struct Reduction {
  ReduceOpPtr op;
  bool as_bytes = false;  // bool: reduced as uint8 with min, max or xor, which every backend has
  int64_t divide_by = 1;  // where sum and avg axes are merged: sum, then divide

  at::Tensor sent(const at::Tensor& x) const { return as_bytes ? x.view(at::kByte) : x; }
};

/// The reduction of `step`, an all_reduce or reduce_scatter. ValueError where the dtype has none.
Reduction reduction_of(const spmd::Step& step, c10::IntArrayRef mesh_shape, at::ScalarType dtype);

/// Whether equal values on all ranks reduce to that value: then Replicate is already Partial of the kind.
bool is_idempotent(ReduceKind kind);

}  // namespace serried::detail
