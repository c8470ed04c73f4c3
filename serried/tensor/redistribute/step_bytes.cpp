// Bytes that redistribution steps send.
#include "serried/tensor/redistribute/step_bytes.h"

#include <c10/util/accumulate.h>

#include <algorithm>

#include "serried/spmd/cost.h"

namespace serried::detail {

int64_t step_bytes(const spmd::Step& step, c10::IntArrayRef sizes, c10::ScalarType dtype, c10::IntArrayRef mesh_shape) {
  int64_t ranks = 1, parts = 1, parts_elsewhere = 1;
  for (size_t axis = 0; axis < step.before.size(); ++axis) {
    const bool involved = std::find(step.axes.begin(), step.axes.end(), int64_t(axis)) != step.axes.end();
    if (involved) ranks *= mesh_shape[axis];
    if (!step.before[axis].is_shard()) continue;
    parts *= mesh_shape[axis];
    if (!involved) parts_elsewhere *= mesh_shape[axis];
  }
  const int64_t whole = c10::multiply_integers(sizes) * int64_t(c10::elementSize(dtype));
  if (step.kind == spmd::Step::Kind::exchange) return (whole + parts - 1) / parts;
  return spmd::bytes_sent(step.from, step.to, (whole + parts_elsewhere - 1) / parts_elsewhere, ranks);
}

int64_t step_bytes(const std::vector<spmd::Step>& steps, c10::IntArrayRef sizes, c10::ScalarType dtype,
                   c10::IntArrayRef mesh_shape) {
  int64_t bytes = 0;
  for (const spmd::Step& step : steps) bytes += step_bytes(step, sizes, dtype, mesh_shape);
  return bytes;
}

}  // namespace serried::detail
