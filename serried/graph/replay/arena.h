// The memory that a graph's buffers share.
#pragma once

#include <ATen/core/Tensor.h>

#include "serried/graph/graph.h"

namespace serried::graph {

class Arena {
 public:
  explicit Arena(int64_t num_bytes);
  /// A tensor of its own (no autograd view) on the arena's memory, which it keeps alive.
  at::Tensor tensor_at(int64_t byte_offset, const TensorMeta& meta) const;

 private:
  at::Tensor bytes_;
};

}  // namespace serried::graph
