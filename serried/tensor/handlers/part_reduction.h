// A reduction done part by part: what each rank finds about its part, put together over the mesh.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "serried/tensor/meta.h"

namespace serried::detail {

/// What sums of `dtype` are added up in.
inline at::ScalarType accumulated(at::ScalarType dtype) {
  return c10::isReducedFloatingType(dtype) ? at::kFloat : dtype;
}

/// One tensor and the dims to reduce, at least one of them cut. Partial inputs are reduced first.
class PartReduction {
 public:
  PartReduction(const DTensorMeta& meta, std::vector<int64_t> dims);

  /// Whether any mesh axis cuts one of the dims: only then is there something to put together.
  static bool is_needed(const DTensorMeta& meta, const std::vector<int64_t>& dims);

  const at::Tensor& local() const { return local_; }
  const std::vector<int64_t>& dims() const { return dims_; }
  /// Elements that one result comes from, in this rank's part and altogether.
  int64_t local_count() const { return local_count_; }
  int64_t count() const { return count_; }

  /// Zeros as large as a result with keepdim: what a sum over a part without elements is.
  at::Tensor none(at::ScalarType dtype) const;

  /// `part`, reduced with keepdim, put together over the axes that cut the dims: this rank's part of the result.
  at::Tensor reduced(const at::Tensor& part, ReduceKind kind) const;
  /// `part` of the first rank along those axes, on all of them; that rank has elements where any has.
  at::Tensor of_first(const at::Tensor& part) const;
  /// `part`, which has been put together, as the result.
  at::Tensor as_dtensor(const at::Tensor& part, bool keepdim) const;

 private:
  at::Tensor wrapped(const at::Tensor& part, const Placements& placements, bool keepdim) const;
  Placements placements(ReduceKind kind) const;

  DeviceMesh mesh_;
  Placements placements_;  // of the input, without Partial
  c10::DimVector sizes_;   // global, with keepdim
  std::vector<int64_t> dims_;
  at::Tensor local_;
  int64_t local_count_ = 1;
  int64_t count_ = 1;
};

}  // namespace serried::detail
