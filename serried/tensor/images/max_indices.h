// Indices of largest pixels: one number per pixel of the whole image, or of the rows that one rank reads of it.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "serried/tensor/images/image_cut.h"

namespace serried::detail {

/// Per dim of space the rows that this rank reads.
std::vector<Span> rows_read(const ImageCut& cut);

/// `indices` into `rows` as indices into an image of `sizes`. A row before the first is padding: it stands for the
/// first row of the image that its window, of this dilation, has.
at::Tensor of_whole_image(const at::Tensor& indices, const std::vector<Span>& rows, const Sizes& sizes,
                          const std::vector<int64_t>& dilations);

/// The way back.
at::Tensor of_rows(const at::Tensor& indices, const std::vector<Span>& rows, const Sizes& sizes);

}  // namespace serried::detail
