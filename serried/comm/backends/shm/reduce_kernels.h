// Elementwise reductions over the ranks' contributions, always in rank order.
#pragma once

#include <c10/core/ScalarType.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <cstdint>

namespace serried::shm {

/// out[i] = sources[0][i] op sources[1][i] op … ; `out` may be one of the sources. All contributions are at hand, so
/// half and bfloat16 are added up in float and rounded once, and AVG divides the sum by `num_sources`: of integers the
/// exact sum, towards zero.
using ReduceKernel = void (*)(void* out, const void* const* sources, int num_sources, int64_t count);

/// A part of a reduction. `before` holds what the ranks before these make, null where there are none before; `out` then
/// what all of them make so far, each element in the type that sums are kept in; or, where `num_ranks` is not 0, the
/// result of that many. Parts one after the other give the bits of a ReduceKernel over all sources.
using PartialKernel = void (*)(void* out, const void* before, const void* const* sources, int num_sources,
                               int64_t count, int num_ranks);

struct PartialReduction {
  PartialKernel kernel = nullptr;
  PartialKernel join = nullptr;  // the same of sources that are made by the kernel themselves
  int64_t element_bytes = 0;     // of what is made so far
};

/// The kernel for this machine's instruction set; null where `op` has no meaning for `dtype`.
ReduceKernel find_reduce_kernel(c10::ScalarType dtype, c10d::ReduceOp::RedOpType op);
PartialReduction find_partial_reduction(c10::ScalarType dtype, c10d::ReduceOp::RedOpType op);

/// The same table compiled for one instruction set each.
namespace baseline {
ReduceKernel find(c10::ScalarType dtype, c10d::ReduceOp::RedOpType op);
PartialReduction find_partial(c10::ScalarType dtype, c10d::ReduceOp::RedOpType op);
}  // namespace baseline
namespace avx2 {
ReduceKernel find(c10::ScalarType dtype, c10d::ReduceOp::RedOpType op);
PartialReduction find_partial(c10::ScalarType dtype, c10d::ReduceOp::RedOpType op);
}  // namespace avx2

}  // namespace serried::shm
