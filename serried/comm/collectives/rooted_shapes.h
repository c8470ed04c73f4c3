// What ranks tell each other before a gather or a scatter: shapes may differ in all dims, and of a scatter only the
// source knows them.
#pragma once

#include "serried/comm/collectives/piece_sizes.h"

#include <optional>
#include <vector>

namespace serried::detail {

/// Zeros in one dim, of which one is stored: what ranks have where another is the root.
at::Tensor zeros_without_memory(int64_t size, const at::TensorOptions& options);

struct GatheredParts {
  std::vector<std::vector<int64_t>> shapes;
  std::vector<int64_t> sizes;  // in elements
  bool need_grad = false;      // on any rank
  uint32_t sizes_of_all = 0;   // watch::hash_sizes of what every rank has said
};

/// What every rank passes to a gather. A meta tensor communicates nothing: every rank is taken to pass the same.
class GatherShapes {
 public:
  GatherShapes(const at::Tensor& x, const Group& group, int dst, TimeoutMs timeout, bool now);

  bool are_known() const { return !exchange_ || exchange_->is_complete(); }
  /// Blocks. ValueError on every rank where ranks pass different roots or dtypes.
  GatheredParts get() const;

 private:
  SizeExchange::Table alone_;
  std::optional<SizeExchange> exchange_;
};

struct ScatteredParts {
  std::vector<int64_t> shape;  // of this rank's
  std::vector<int64_t> sizes;  // of all, in elements
  at::TensorOptions options;
  bool need_grad = false;
  uint32_t sizes_of_all = 0;  // watch::hash_sizes of what the source has said to all
};

/// What the source of a scatter sends to whom. Communicates for meta tensors too: the others know nothing of them.
class ScatterShapes {
 public:
  ScatterShapes(at::TensorList tensors, const Group& group, int src, TimeoutMs timeout, bool now);

  bool are_known() const { return !exchange_ || exchange_->is_complete(); }
  /// Blocks. ValueError on every rank where ranks pass different roots, one that is not the source passes tensors, or
  /// the list of the source does not fit.
  ScatteredParts get() const;
  /// The list in one row, a copy; elsewhere zeros, of which a gradient goes the same way back.
  at::Tensor input(const ScatteredParts& parts) const;

 private:
  const int rank_;
  const at::Device device_;
  at::Tensor row_;  // undefined where this rank does not send
  SizeExchange::Table alone_;
  std::optional<SizeExchange> exchange_;
};

}  // namespace serried::detail
