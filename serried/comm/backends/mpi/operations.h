// Reductions for MPI that mean what they mean on our other backends: half and bfloat16, bool, NaN that wins MIN and
// MAX.
#pragma once

#include "serried/comm/backends/mpi/moves.h"

#include <c10/core/ScalarType.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

namespace serried::mpi {

/// The caller has checked that `op` has a meaning for `dtype`, and has the turn: operations are made on first use.
Reduction reduction_of(at::ScalarType dtype, c10d::ReduceOp::RedOpType op);

}  // namespace serried::mpi
