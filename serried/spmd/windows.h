// Which rows of an image an op on windows reads for which rows of its result: arithmetic on one dim of space.
#pragma once

#include <cstdint>
#include <vector>

#include "serried/mesh/layout.h"

namespace serried::spmd {

/// One dim of a convolution or pool. Output o reads the rows o * stride - padding + k * dilation, k < kernel; of a
/// transposed convolution row i writes the outputs i * stride - padding + k * dilation.
struct Window {
  int64_t kernel = 1;
  int64_t stride = 1;
  int64_t dilation = 1;
  int64_t padding = 0;

  /// Rows from the first to the last that one output reads.
  int64_t extent() const { return (kernel - 1) * dilation + 1; }
};

/// How many outputs an image of `size` has; less than 1 where it is too small. With `round_up` (ceil_mode) the last
/// window may reach beyond the padding, but begins before it.
int64_t num_outputs(const Window& window, int64_t size, bool round_up = false);

/// The rows that `outputs` read, as far as windows reach: those outside of the image are padding. None for none.
///     window_rows({.kernel = 3, .padding = 1}, [4, 8))  ->  [3, 9)
Span window_rows(const Window& window, const Span& outputs);

/// The rows of an image of `size` that write to `outputs` of a transposed convolution.
Span transposed_rows(const Window& window, int64_t size, const Span& outputs);

/// All outputs that `rows` of a transposed convolution write to, those outside of the result included.
Span transposed_outputs(const Window& window, const Span& rows);

/// The rows of an image of `size` that `outputs` of an adaptive pool with `num_outputs` in all read.
///     adaptive_rows(10, 4, [1, 2))  ->  [2, 5)
Span adaptive_rows(int64_t size, int64_t num_outputs, const Span& outputs);

/// Per output the rows that an average counts in an image of `size`: with or without padding. What lies beyond the
/// padding (ceil_mode) never counts.
std::vector<int64_t> rows_averaged(const Window& window, int64_t size, const Span& outputs, bool count_padding);

/// The common rows; of size 0 where there are none.
Span common_rows(const Span& a, const Span& b);

}  // namespace serried::spmd
