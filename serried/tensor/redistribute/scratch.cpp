// One block of memory per thread, grown on demand up to a limit.
#include "serried/tensor/redistribute/scratch.h"

#include <ATen/ATen.h>
#include <c10/core/CPUAllocator.h>

#include "serried/tape/tape.h"

namespace serried::detail {
namespace {

constexpr int64_t kSmallest = int64_t(64) << 10;  // below that the allocator keeps the block itself
constexpr int64_t kLargest = int64_t(32) << 20;   // above that the copy dwarfs the faults, and keeping it is waste

struct KeptMemory {
  c10::DataPtr memory;
  int64_t bytes = 0;
};

}  // namespace

at::Tensor scratch(c10::IntArrayRef sizes, const at::TensorOptions& options) {
  const int64_t bytes = c10::multiply_integers(sizes) * int64_t(options.dtype().itemsize());
  if (!options.device().is_cpu() || bytes < kSmallest || bytes > kLargest) return at::empty(sizes, options);
  // A recorder must see where the memory comes from.
  if (tape::is_recording()) return at::empty(sizes, options);
  thread_local KeptMemory kept;
  if (kept.bytes < bytes) {
    kept = {};  // first give back, so that both never live together
    kept = {c10::GetCPUAllocator()->allocate(size_t(bytes)), bytes};
  }
  return at::from_blob(kept.memory.get(), sizes, options);
}

}  // namespace serried::detail
