// Which rows a resize reads for each output of one dim, and how much each counts.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>
#include <vector>

#include "serried/mesh/layout.h"

namespace serried::detail {

/// One dim of a resize.
struct ResizedDim {
  int64_t inputs = 0, outputs = 0;
  std::optional<bool> align_corners = {};  // none: nearest
  std::optional<double> scale = {};        // as the call says
};

/// Per output as many taps, some perhaps of weight 0.
struct Taps {
  std::vector<std::vector<int64_t>> rows;    // [tap][output]
  std::vector<std::vector<double>> weights;  // none: each row counts as it is

  /// From the first to the last row that these outputs read.
  Span rows_read(const Span& outputs) const;
  /// Whether every output is the row of its number.
  bool changes_nothing(int64_t inputs) const;
};

/// Asked of the op itself, by a resize of one narrow image: its indices and weights come out of arithmetic in some
/// precision, and computing them otherwise would now and then give a neighbour. `op` is a forward, and not nearest.
Taps taps_of(const c10::OperatorHandle& op, const ResizedDim& dim, size_t place, size_t space_ndim,
             const at::TensorOptions& options);

/// LibTorch's kernels of nearest resizes. They differ where an image keeps its size or doubles: `by_pixel` copies
/// then, `by_dim` goes by the scale of the call. `by_pixel` computes indices in float, whatever the dtype.
enum class NearestKernel : uint8_t { by_dim, by_pixel };

/// The kernel that LibTorch takes for the whole image.
NearestKernel nearest_kernel(const at::Tensor& image, c10::IntArrayRef outputs);

/// Whether it would be another one if the image were contiguous, as it is once it has been gathered.
bool goes_by_layout(const at::Tensor& image, c10::IntArrayRef outputs);

/// The same of a nearest resize by `kernel`.
Taps taps_of_nearest(const c10::OperatorHandle& op, const ResizedDim& dim, size_t place, size_t space_ndim,
                     const at::TensorOptions& options, NearestKernel kernel);

/// The same of the backward of a nearest resize, which computes its indices by itself.
Taps taps_of_nearest_backward(const c10::OperatorHandle& op, const ResizedDim& dim, size_t place, size_t space_ndim,
                              const at::TensorOptions& options);

/// Resizes dim `dim` of `x`, whose rows begin at `first`, to `outputs`.
at::Tensor apply_taps(const Taps& taps, const at::Tensor& x, int64_t dim, int64_t first, const Span& outputs);

/// The transpose: from gradients of `outputs` to those of `rows`.
at::Tensor apply_taps_back(const Taps& taps, const at::Tensor& gradient, int64_t dim, const Span& rows,
                           const Span& outputs);

}  // namespace serried::detail
