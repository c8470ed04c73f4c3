// What factories and born-sharded modules share: a checked spec, and its part filled.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Scalar.h>
#include <c10/core/TensorOptions.h>

#include <string_view>

#include "serried/tensor/making/like.h"
#include "serried/tensor/random/stream_fill.h"

namespace serried::detail {

/// What a factory is asked for.
struct FactoryCall {
  std::string_view where;
  at::IntArrayRef sizes;
  const DeviceMesh& mesh;
  const Placements& placements;  // empty: replicated
  at::TensorOptions options;
};

/// The spec, and memory for the part. ValueError for sizes, placements or options that do not fit.
Part make_part(const FactoryCall& call);

/// Fills with a known value; a Partial holds it once.
void fill_value(const Part& part, const at::Scalar& value);

/// Fills with the numbers that `op` on the whole would draw. ValueError for Partial.
void fill_random(std::string_view where, const Part& part, const StreamOp& op,
                 const std::optional<at::Generator>& generator = {});

/// This rank's part of `whole`, which every rank has; a Partial holds it once.
Part cut_whole(std::string_view where, const at::Tensor& whole, const DeviceMesh& mesh, const Placements& placements);

/// The dtype of torch::full without one.
at::ScalarType dtype_of_fill(const at::Scalar& fill);

}  // namespace serried::detail
