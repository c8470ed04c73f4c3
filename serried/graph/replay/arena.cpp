// Cuts tensors from one allocation.
#include "serried/graph/replay/arena.h"

#include <ATen/ops/empty.h>

namespace serried::graph {

Arena::Arena(int64_t num_bytes) : bytes_(at::empty({num_bytes}, at::kByte)) {}

at::Tensor Arena::tensor_at(int64_t byte_offset, const TensorMeta& meta) const {
  at::Tensor t = at::empty({0}, at::TensorOptions(meta.dtype));
  const int64_t item = int64_t(c10::elementSize(meta.dtype));
  return t.set_(bytes_.storage(), byte_offset / item + meta.offset, meta.sizes, meta.strides);
}

}  // namespace serried::graph
