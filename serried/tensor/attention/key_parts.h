// Keys and values of one rank side by side, so that they travel as one.
#pragma once

#include <ATen/ATen.h>

#include "serried/tensor/attention/sequence_attention.h"

namespace serried::detail {

/// Memory for [2, batch, heads, positions of one rank, size], of whichever rank: as large as the largest part.
class KeyBuffer {
 public:
  KeyBuffer(const at::Tensor& key, const SequenceCut& cut, at::ScalarType dtype)
      : sizes_({2, key.size(0), key.size(1), cut.largest_size(), key.size(3)}),
        flat_(at::empty({c10::multiply_integers(sizes_)}, key.options().dtype(dtype))) {}

  /// As the part of a rank with `length` positions.
  at::Tensor part(int64_t length) const {
    Sizes sizes = sizes_;
    sizes[3] = length;
    if (length == 0) return flat_.new_empty(sizes);  // a recorder would ask what lies in memory that nobody wrote
    return flat_.narrow(0, 0, c10::multiply_integers(sizes)).view(sizes);
  }

  int64_t bytes() const { return int64_t(flat_.nbytes()); }

 private:
  Sizes sizes_;
  at::Tensor flat_;
};

}  // namespace serried::detail
