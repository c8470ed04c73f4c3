// Tensors that are this rank's part of a sequence for a while.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "serried/tensor/attention/sequence_cut.h"

namespace serried::detail {

/// The positions of `rank` along `dim` of `whole`, in their order.
at::Tensor sequence_part(const at::Tensor& whole, int64_t dim, const SequenceCut& cut, int64_t rank);

/// Puts back what it changed, if it was not told to leave it.
class CutBuffers {
 public:
  CutBuffers() = default;
  ~CutBuffers();
  CutBuffers(const CutBuffers&) = delete;
  CutBuffers& operator=(const CutBuffers&) = delete;

  /// `buffer` itself, whoever holds it, becomes `part`.
  void cut(const at::Tensor& buffer, const at::Tensor& part, bool is_restored);

 private:
  struct Restored {
    at::Tensor buffer;
    at::Tensor whole;
  };
  std::vector<Restored> restored_;
};

}  // namespace serried::detail
