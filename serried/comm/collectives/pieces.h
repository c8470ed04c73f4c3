// Pieces of a tensor along a dim, one per rank: how it is cut, and how pieces become one again.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

namespace serried::detail {

/// Sizes per rank, the same cut as Shard's: ceil(size / num_ranks) each, the last ranks less or nothing.
///     shard_sizes(10, 4)  ->  3 3 3 1        shard_sizes(2, 4)  ->  1 1 0 0
std::vector<int64_t> shard_sizes(int64_t size, int num_ranks);

int64_t sum_of(c10::IntArrayRef sizes);

/// `sizes` with entry `dim` replaced.
std::vector<int64_t> with_size(c10::IntArrayRef sizes, int64_t dim, int64_t size);

/// Contiguous pieces of `x`, of these sizes along `dim`.
std::vector<at::Tensor> cut_pieces(const at::Tensor& x, int64_t dim, c10::IntArrayRef sizes);

/// A result that arrives in pieces along `dim`: in place where the pieces lie contiguous in it, else joined afterwards.
class ArrivingPieces {
 public:
  /// `one_each`: never as one tensor.
  ArrivingPieces(const at::Tensor& whole, int64_t dim, c10::IntArrayRef sizes, bool one_each = false);

  /// What a Collective gets: the whole where equal pieces lie in it in a row, else a tensor per rank.
  at::TensorList outputs() const { return outputs_; }
  /// Once they are there; empty where they lie in their places.
  std::function<void()> what_is_left() const;

 private:
  at::Tensor whole_;
  int64_t dim_;
  bool in_place_;
  std::vector<at::Tensor> outputs_;
};

}  // namespace serried::detail
