// Reads taps off small images: of a nearest resize off one whose pixels are the numbers of their rows, of others off a
// comb, whose channel c has a one in every row that leaves c when divided by the channels.
#include "serried/tensor/images/taps.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <unordered_map>

#include "serried/tape/tape.h"
#include "serried/tensor/images/local_call.h"

namespace serried::detail {
namespace {

// More than the rows that any of the ops reads for an output, so that a channel tells which of them it was.
constexpr int64_t kTeeth = 8;

// LibTorch's threshold: 2-d results whose height and width add up to more go by dim.
constexpr int64_t kMostByPixel = 128;
// The fewest that go by pixel where channels come last.
constexpr int64_t kChannelsByPixel = 4;

at::MemoryFormat channels_last(size_t space_ndim) {
  return space_ndim == 2 ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::ChannelsLast3d;
}

bool is_small_plane(c10::IntArrayRef outputs) {
  return outputs.size() == 2 && outputs[0] + outputs[1] <= kMostByPixel;
}

// How the image of a probe lies, and how wide its other dims come out.
struct ProbeShape {
  at::MemoryFormat format = at::MemoryFormat::Contiguous;
  int64_t others = 1;
};

// The call on an image that is narrow but for dim `place`. Per channel what the outputs of this dim are.
at::Tensor resize_probe(const c10::OperatorHandle& op, const at::Tensor& image, const ResizedDim& dim, size_t place,
                        size_t space_ndim, ProbeShape shape = {}) {
  const auto narrow = [&](int64_t size, int64_t others = 1) {
    Sizes sizes(space_ndim, others);
    sizes[place] = size;
    return sizes;
  };
  torch::jit::Stack stack;
  size_t next_scale = 0;
  for (const c10::Argument& argument : op.schema().arguments()) {
    const std::string& name = argument.name();
    if (name == "self" || name == "grad_output") {
      Sizes sizes{1, image.size(0)};
      for (const int64_t size : narrow(image.size(1))) sizes.push_back(size);
      stack.emplace_back(image.view(sizes).contiguous(shape.format));
    } else if (name == "output_size") {
      stack.emplace_back(narrow(dim.outputs, shape.others));
    } else if (name == "input_size") {
      Sizes sizes = narrow(dim.inputs);
      sizes.insert(sizes.begin(), {1, image.size(0)});
      stack.emplace_back(sizes);
    } else if (name == "align_corners") {
      stack.emplace_back(dim.align_corners.value_or(false));
    } else {
      stack.push_back(next_scale++ == place ? c10::IValue(dim.scale) : c10::IValue());
    }
  }
  tape::run(op, stack);
  at::Tensor seen = stack[0].toTensor()[0];
  for (size_t d = space_ndim; d-- > 0;) {
    if (d != place) seen = seen.select(int64_t(d) + 1, 0);
  }
  return seen.to(at::kCPU, at::kDouble).contiguous();
}

// Where output `o` lies in the input, as numbers go; right to a row or two.
int64_t centre_of(const ResizedDim& dim, int64_t o) {
  const double scale =
      dim.scale.has_value() && *dim.scale > 0 ? 1 / *dim.scale : double(dim.inputs) / double(dim.outputs);
  double source = (double(o) + 0.5) * scale - 0.5;
  if (dim.align_corners.value_or(false)) {
    source = dim.outputs > 1 ? double(o) * double(dim.inputs - 1) / double(dim.outputs - 1) : 0;
  }
  return std::clamp<int64_t>(int64_t(std::floor(source)), 0, dim.inputs - 1);
}

at::TensorOptions probe_options(const at::TensorOptions& options) {
  const at::ScalarType dtype = c10::typeMetaToScalarType(options.dtype());
  return options.dtype(c10::isReducedFloatingType(dtype) ? at::kFloat : dtype);
}

struct Tap {
  int64_t row;
  double weight;
};

Taps in_columns(const std::vector<std::vector<Tap>>& of_outputs) {
  size_t most = 1;
  for (const auto& taps : of_outputs) most = std::max(most, taps.size());
  Taps columns;
  columns.rows.assign(most, {});
  columns.weights.assign(most, {});
  for (const auto& taps : of_outputs) {
    for (size_t t = 0; t < most; ++t) {
      const Tap tap = t < taps.size() ? taps[t] : Tap{taps.empty() ? 0 : taps[0].row, 0};
      columns.rows[t].push_back(tap.row);
      columns.weights[t].push_back(tap.weight);
    }
  }
  return columns;
}

// The same tensor for the same numbers: what a recorder meets in two calls is a constant then. Not for ever: sizes that
// change with every batch would pile up.
template <class T>
at::Tensor constant(const std::vector<T>& values, const at::TensorOptions& options) {
  constexpr size_t kMost = 1024;
  static thread_local std::unordered_map<std::string, at::Tensor> kept;
  std::string key = c10::str(options.dtype().name(), " ", options.device(), " ");
  key.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
  const auto found = kept.find(key);
  if (found != kept.end()) return found->second;
  if (kept.size() == kMost) kept.clear();
  const tape::Pause not_recorded;
  return kept.emplace(key, at::tensor(values).to(options)).first->second;
}

at::Tensor rows_for(const std::vector<int64_t>& all, const Span& some, int64_t first, const at::Tensor& like) {
  std::vector<int64_t> rows(all.begin() + some.begin, all.begin() + some.end());
  for (int64_t& row : rows) row -= first;
  return constant(rows, like.options().dtype(at::kLong));
}

at::Tensor weights_for(const std::vector<double>& all, const Span& some, int64_t dim, const at::Tensor& like) {
  const std::vector<double> weights(all.begin() + some.begin, all.begin() + some.end());
  Sizes beside(size_t(like.dim()), 1);
  beside[size_t(dim)] = some.size;
  return constant(weights, like.options()).view(beside);
}

}  // namespace

Span Taps::rows_read(const Span& outputs) const {
  if (outputs.size == 0) return {};
  int64_t first = rows[0][size_t(outputs.begin)], last = first;
  for (const auto& of_tap : rows) {
    const auto begin = of_tap.begin() + outputs.begin;
    const auto [low, high] = std::minmax_element(begin, begin + outputs.size);
    first = std::min(first, *low);
    last = std::max(last, *high);
  }
  return {first, last - first + 1};
}

bool Taps::changes_nothing(int64_t inputs) const {
  if (rows.size() != 1 || int64_t(rows[0].size()) != inputs) return false;
  for (int64_t o = 0; o < inputs; ++o) {
    if (rows[0][size_t(o)] != o || (!weights.empty() && weights[0][size_t(o)] != 1)) return false;
  }
  return true;
}

Taps taps_of(const c10::OperatorHandle& op, const ResizedDim& dim, size_t place, size_t space_ndim,
             const at::TensorOptions& options) {
  const tape::Pause not_recorded;
  const at::Tensor number = at::arange(dim.inputs, probe_options(options));
  const at::Tensor teeth = at::arange(kTeeth, probe_options(options)).unsqueeze(1);
  const at::Tensor comb = number.remainder(kTeeth).eq(teeth).to(number.dtype());
  const at::Tensor seen = resize_probe(op, comb, dim, place, space_ndim);
  const double* weights = seen.const_data_ptr<double>();
  std::vector<std::vector<Tap>> of_outputs(static_cast<size_t>(dim.outputs));
  for (int64_t o = 0; o < dim.outputs; ++o) {
    const int64_t centre = centre_of(dim, o);
    const int64_t first = std::max<int64_t>(centre - kTeeth / 2, 0);
    for (int64_t row = first; row < std::min(first + kTeeth, dim.inputs); ++row) {
      const double weight = weights[(row % kTeeth) * dim.outputs + o];
      if (weight != 0) of_outputs[size_t(o)].push_back({row, weight});
    }
  }
  return in_columns(of_outputs);
}

bool goes_by_layout(const at::Tensor& image, c10::IntArrayRef outputs) {
  return outputs.size() > 1 && !is_small_plane(outputs) && image.size(1) >= kChannelsByPixel &&
         image.is_contiguous(channels_last(outputs.size()));
}

NearestKernel nearest_kernel(const at::Tensor& image, c10::IntArrayRef outputs) {
  return is_small_plane(outputs) || goes_by_layout(image, outputs) ? NearestKernel::by_pixel : NearestKernel::by_dim;
}

Taps taps_of_nearest(const c10::OperatorHandle& op, const ResizedDim& dim, size_t place, size_t space_ndim,
                     const at::TensorOptions& options, NearestKernel kernel) {
  const tape::Pause not_recorded;
  ProbeShape shape;
  int64_t num_channels = 1;
  if (kernel == NearestKernel::by_pixel) {
    shape.format = channels_last(space_ndim);
    num_channels = kChannelsByPixel;
  } else if (space_ndim == 2) {
    shape.others = std::max<int64_t>(kMostByPixel + 1 - dim.outputs, 1);
  }
  const at::Tensor number = at::arange(dim.inputs, probe_options(options)).repeat({num_channels, 1});
  const at::Tensor seen = resize_probe(op, number, dim, place, space_ndim, shape);
  const double* rows = seen.const_data_ptr<double>();
  Taps taps;
  taps.rows.emplace_back(rows, rows + dim.outputs);
  return taps;
}

Taps taps_of_nearest_backward(const c10::OperatorHandle& op, const ResizedDim& dim, size_t place, size_t space_ndim,
                              const at::TensorOptions& options) {
  const tape::Pause not_recorded;
  const at::Tensor ones = at::ones({1, dim.outputs}, probe_options(options));
  const at::Tensor counts = resize_probe(op, ones, dim, place, space_ndim);
  Taps taps;
  taps.rows.resize(1);
  for (int64_t row = 0; row < dim.inputs; ++row) {
    taps.rows[0].insert(taps.rows[0].end(), size_t(std::llround(counts.const_data_ptr<double>()[row])), row);
  }
  return taps;
}

at::Tensor apply_taps(const Taps& taps, const at::Tensor& x, int64_t dim, int64_t first, const Span& outputs) {
  at::Tensor result;
  for (size_t t = 0; t < taps.rows.size(); ++t) {
    at::Tensor term = x.index_select(dim, rows_for(taps.rows[t], outputs, first, x));
    if (!taps.weights.empty()) term = term * weights_for(taps.weights[t], outputs, dim, x);
    result = result.defined() ? result + term : term;
  }
  return result;
}

at::Tensor apply_taps_back(const Taps& taps, const at::Tensor& gradient, int64_t dim, const Span& rows,
                           const Span& outputs) {
  Sizes sizes = gradient.sizes().vec();
  sizes[size_t(dim)] = rows.size;
  const at::Tensor result = at::zeros(sizes, gradient.options());
  for (size_t t = 0; t < taps.rows.size(); ++t) {
    const at::Tensor term =
        taps.weights.empty() ? gradient : gradient * weights_for(taps.weights[t], outputs, dim, gradient);
    result.index_add_(dim, rows_for(taps.rows[t], outputs, rows.begin, gradient), term);
  }
  return result;
}

}  // namespace serried::detail
