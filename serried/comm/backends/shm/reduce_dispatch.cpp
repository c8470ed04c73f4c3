// Chooses the kernels for the instruction set of this machine.
#include "serried/comm/backends/shm/reduce_kernels.h"

namespace serried::shm {

ReduceKernel find_reduce_kernel(c10::ScalarType dtype, c10d::ReduceOp::RedOpType op) {
#if defined(__x86_64__)
  static const bool has_avx2 = __builtin_cpu_supports("avx2") != 0;
  if (has_avx2) return avx2::find(dtype, op);
#endif
  return baseline::find(dtype, op);
}

}  // namespace serried::shm
