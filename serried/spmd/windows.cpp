// Windows, transposed windows and adaptive regions as spans of rows.
#include "serried/spmd/windows.h"

#include <algorithm>

namespace serried::spmd {
namespace {

int64_t floor_divide(int64_t a, int64_t b) {
  return a >= 0 ? a / b : -((-a + b - 1) / b);
}

Span between(int64_t begin, int64_t end) {
  return end > begin ? Span{begin, end - begin} : Span{};
}

}  // namespace

int64_t num_outputs(const Window& window, int64_t size, bool round_up) {
  const int64_t steps = size + 2 * window.padding - window.extent() + (round_up ? window.stride - 1 : 0);
  const int64_t count = floor_divide(steps, window.stride) + 1;
  const bool begins_behind = round_up && (count - 1) * window.stride >= size + window.padding;
  return begins_behind ? count - 1 : count;
}

Span window_rows(const Window& window, const Span& outputs) {
  if (outputs.size == 0) return {};
  return {outputs.begin * window.stride - window.padding, (outputs.size - 1) * window.stride + window.extent()};
}

Span transposed_rows(const Window& window, int64_t size, const Span& outputs) {
  if (outputs.size == 0) return {};
  const int64_t before_first = floor_divide(outputs.begin + window.padding - window.extent(), window.stride);
  const int64_t last = floor_divide(outputs.end() - 1 + window.padding, window.stride);
  return between(std::max<int64_t>(before_first + 1, 0), std::min(last + 1, size));
}

Span transposed_outputs(const Window& window, const Span& rows) {
  return window_rows(window, rows);
}

Span adaptive_rows(int64_t size, int64_t num_outputs, const Span& outputs) {
  if (outputs.size == 0) return {};
  return between(outputs.begin * size / num_outputs, (outputs.end() * size + num_outputs - 1) / num_outputs);
}

std::vector<int64_t> rows_averaged(const Window& window, int64_t size, const Span& outputs, bool count_padding) {
  std::vector<int64_t> counts;
  for (int64_t output = outputs.begin; output < outputs.end(); ++output) {
    const int64_t begin = output * window.stride - window.padding;
    const int64_t end = std::min(begin + window.kernel, size + window.padding);
    counts.push_back(count_padding ? end - begin : std::min(end, size) - std::max<int64_t>(begin, 0));
  }
  return counts;
}

Span common_rows(const Span& a, const Span& b) {
  return between(std::max(a.begin, b.begin), std::min(a.end(), b.end()));
}

}  // namespace serried::spmd
