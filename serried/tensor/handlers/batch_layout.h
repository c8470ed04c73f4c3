// How the input of batch norm and what it has per channel lie beside each other.
#pragma once

#include <ATen/core/Tensor.h>

#include "serried/tensor/meta.h"

namespace serried::detail {

/// Axes either cut channels (dim 1), cut what statistics run over (any other dim), or repeat. Pending sums are whole
/// here.
class BatchLayout {
 public:
  explicit BatchLayout(const at::Tensor& input);

  /// Whether statistics need other ranks.
  bool cuts_batch() const { return cuts_batch_; }
  /// Elements per channel, of all ranks and on this one.
  double count() const { return count_; }
  double count_here() const { return count_here_; }
  /// All dims but the channels.
  const Sizes& reduced_dims() const { return reduced_dims_; }

  /// This rank's part of a tensor shaped like the input.
  at::Tensor local(const at::Tensor& t) const;
  /// This rank's channels of a tensor that has one value per channel; undefined stays so.
  at::Tensor local_channels(const at::Tensor& t) const;

  /// Sums over the ranks that cut the batch. The last dim of `local` are this rank's channels.
  at::Tensor sum_over_ranks(const at::Tensor& local) const;
  /// All channels of a tensor that holds this rank's.
  at::Tensor whole_channels(const at::Tensor& local) const;

  at::Tensor wrap_input(const at::Tensor& local) const;
  at::Tensor wrap_channels(const at::Tensor& local) const;
  at::Tensor wrap_whole(const at::Tensor& local) const;

 private:
  SpecPtr spec_like(const at::Tensor& local, const Placements& placements) const;
  Placements channel_placements(int64_t dim) const;

  SpecPtr spec_;  // of the input, without pending sums
  bool cuts_batch_ = false;
  double count_ = 0;
  double count_here_ = 0;
  Sizes reduced_dims_;
};

}  // namespace serried::detail
