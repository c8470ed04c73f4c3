// Convolutions of images that are cut along their space: every rank fetches the rows its outputs read, and convolves.
#include <ATen/ATen.h>

#include <algorithm>

#include "serried/tensor/dispatch/local_only.h"
#include "serried/tensor/images/local_call.h"

namespace serried {
namespace {

using detail::ImageCut;
using detail::LocalOnly;
using detail::OpCall;
using detail::run_local;
using detail::Space;
using spmd::Window;
using torch::jit::Stack;

struct Convolution {
  std::vector<Window> windows;  // per dim of space
  Sizes output_padding;
  bool transposed = false;
  int64_t groups = 1;
  Space space;
};

bool has_space(const Convolution& conv) {
  for (size_t d = 0; d < conv.windows.size(); ++d) {
    const Window& window = conv.windows[d];
    if (window.kernel < 1 || window.stride < 1 || window.dilation < 1 || window.padding < 0) return false;
    if (conv.output_padding[d] < 0 || conv.space.inputs[d] < 1 || conv.space.outputs[d] < 1) return false;
    if (conv.transposed && conv.output_padding[d] >= std::max(window.stride, window.dilation)) return false;
  }
  return true;
}

bool channels_fit(const OpCall& call, const Convolution& conv) {
  const at::Tensor input = call.tensor_value("input"), weight = call.tensor_value("weight");
  const int64_t channels = input.size(1);
  if (conv.groups < 1 || channels < 1 || weight.size(0) < 1 || weight.size(0) % conv.groups != 0) return false;
  const int64_t wanted = conv.transposed ? weight.size(0) : weight.size(1) * conv.groups;
  const int64_t made = conv.transposed ? weight.size(1) * conv.groups : weight.size(0);
  const at::Tensor bias = call.tensor_value("bias");
  const bool bias_fits = !bias.defined() || (bias.dim() == 1 && bias.size(0) == made);
  const at::Tensor gradient = call.tensor_value("grad_output");
  const bool gradient_fits = !gradient.defined() || (gradient.size(0) == input.size(0) && gradient.size(1) == made);
  return channels == wanted && bias_fits && gradient_fits && input.scalar_type() == weight.scalar_type();
}

Space space_of(const Convolution& conv, const at::Tensor& input) {
  const size_t ndim = conv.windows.size();
  Space space{detail::last_sizes(input.sizes(), ndim), {}, {}};
  for (size_t d = 0; d < ndim; ++d) {
    const Window& window = conv.windows[d];
    const int64_t size = space.inputs[d];
    space.outputs.push_back(conv.transposed ? (size - 1) * window.stride - 2 * window.padding + window.extent() +
                                                  conv.output_padding[d]
                                            : (window.stride < 1 ? 0 : num_outputs(window, size)));
  }
  space.rows = [windows = conv.windows, sizes = space.inputs, transposed = conv.transposed](size_t d,
                                                                                            const Span& outputs) {
    return transposed ? transposed_rows(windows[d], sizes[d], outputs) : window_rows(windows[d], outputs);
  };
  return space;
}

// None for calls that the op itself would refuse: then it does, as it refuses whole tensors.
std::optional<Convolution> read_convolution(const OpCall& call) {
  const at::Tensor input = call.tensor_value("input"), weight = call.tensor_value("weight");
  if (input.dim() != weight.dim() || input.dim() < 3) return std::nullopt;
  const size_t ndim = size_t(input.dim()) - 2;
  const auto stride = detail::per_dim(call, "stride", ndim), padding = detail::per_dim(call, "padding", ndim);
  const auto dilation = detail::per_dim(call, "dilation", ndim);
  const auto output_padding = detail::per_dim(call, "output_padding", ndim);
  if (!stride || !padding || !dilation || !output_padding) return std::nullopt;
  Convolution conv{.windows = {},
                   .output_padding = *output_padding,
                   .transposed = call.flag("transposed"),
                   .groups = call.integer("groups", 1),
                   .space = {}};
  for (size_t d = 0; d < ndim; ++d) {
    conv.windows.push_back({.kernel = weight.size(int64_t(d) + 2),
                            .stride = (*stride)[d],
                            .dilation = (*dilation)[d],
                            .padding = (*padding)[d]});
  }
  conv.space = space_of(conv, input);
  const at::Tensor gradient = call.tensor_value("grad_output");
  if (gradient.defined() &&
      (gradient.dim() != input.dim() || detail::last_sizes(gradient.sizes(), ndim) != conv.space.outputs)) {
    return std::nullopt;
  }
  if (!has_space(conv) || !channels_fit(call, conv)) return std::nullopt;
  return conv;
}

// Padding is among the rows where space is cut.
detail::Replaced local_arguments(const Convolution& conv, const ImageCut& cut) {
  Sizes padding, output_padding;
  for (size_t d = 0; d < conv.windows.size(); ++d) {
    padding.push_back(cut.is_cut(d) ? 0 : conv.windows[d].padding);
    output_padding.push_back(cut.is_cut(d) ? 0 : conv.output_padding[d]);
  }
  return {{"padding", padding}, {"output_padding", output_padding}};
}

// What rows of a transposed convolution write reaches beyond this rank's outputs, and may leave some of them out: pads
// with zeros and crops, from one to the other or back.
at::Tensor fitted(const at::Tensor& t, const Convolution& conv, const ImageCut& cut, bool to_outputs) {
  std::vector<int64_t> pads;
  for (size_t d = conv.windows.size(); d-- > 0;) {
    const Span& own = cut.outputs(d);
    const Span written = cut.is_cut(d) ? transposed_outputs(conv.windows[d], cut.rows(d)) : own;
    const int64_t sign = to_outputs ? 1 : -1;
    pads.push_back(sign * (written.begin - own.begin));
    pads.push_back(sign * (own.end() - written.end()));
  }
  const bool fits = std::all_of(pads.begin(), pads.end(), [](int64_t pad) { return pad == 0; });
  return fits ? t : at::constant_pad_nd(t, pads);
}

at::Tensor beside_image(const at::Tensor& bias, int64_t ndim) {
  Sizes sizes(size_t(ndim), 1);
  sizes[1] = bias.numel();
  return bias.view(sizes);
}

at::Tensor forward_part(const c10::OperatorHandle& op, const OpCall& call, const Convolution& conv,
                        const ImageCut& cut) {
  const at::Tensor x = cut.local("input"), weight = cut.local("weight"), bias = cut.local("bias");
  const at::Tensor rows = cut.borders().fetch(x, 0);
  Sizes sizes = cut.output_sizes(x.sizes());
  sizes[1] = conv.transposed ? weight.size(1) * conv.groups : weight.size(0);
  const bool is_empty = rows.numel() == 0 || c10::multiply_integers(sizes) == 0;
  if (!is_empty && !conv.transposed) {
    detail::Replaced arguments = local_arguments(conv, cut);
    arguments.insert(arguments.end(), {{"input", rows}, {"weight", weight}});
    if (bias.defined()) arguments.emplace_back("bias", bias);
    return run_local(op, call, arguments)[0].toTensor();
  }
  at::Tensor y;
  if (is_empty) {
    y = at::zeros(sizes, x.options());
  } else {
    detail::Replaced arguments = local_arguments(conv, cut);
    arguments.insert(arguments.end(), {{"input", rows}, {"weight", weight}, {"bias", c10::IValue()}});
    y = fitted(run_local(op, call, arguments)[0].toTensor(), conv, cut, /*to_outputs=*/true);
  }
  return bias.defined() ? y + beside_image(bias, y.dim()) : y;
}

bool run_convolution(const c10::OperatorHandle& op, Stack& stack) {
  const OpCall call(op, stack);
  const at::Tensor& input = call.argument(0).toTensor();
  if (input.dim() < 3 || !detail::is_cut_in_space(call, size_t(input.dim()) - 2)) return false;
  const std::optional<Convolution> conv = read_convolution(call);
  if (!conv) return false;
  const std::optional<ImageCut> cut = ImageCut::of(op, stack, conv->space, {.fetch = true, .give_back = false});
  if (!cut) return false;
  at::Tensor result;
  {
    const LocalOnly guard;
    result = cut->wrap(0, forward_part(op, call, *conv, *cut));
  }
  return detail::finish(op, stack, {result});
}

struct Wanted {
  bool input, weight, bias;
};

struct Gradients {
  at::Tensor rows, weight, bias;
};

at::Tensor sum_per_channel(const at::Tensor& t) {
  Sizes dims{0};
  for (int64_t d = 2; d < t.dim(); ++d) dims.push_back(d);
  return t.sum(dims);
}

// Of this rank's outputs only: rows of neighbours get their share from here, and weights are sums over ranks.
Gradients gradients_part(const c10::OperatorHandle& op, const OpCall& call, const Convolution& conv,
                         const ImageCut& cut, const Wanted& wanted) {
  const at::Tensor gradient = cut.local("grad_output"), x = cut.local("input"), weight = cut.local("weight");
  const at::Tensor bias = wanted.bias ? sum_per_channel(gradient) : at::Tensor();
  if (!wanted.input && !wanted.weight) return {{}, {}, bias};
  const at::Tensor rows =
      wanted.weight ? cut.borders().fetch(x, 0) : at::zeros(cut.borders().wanted_sizes(x.sizes()), x.options());
  if (rows.numel() == 0 || gradient.numel() == 0) {
    return {wanted.input ? at::zeros(rows.sizes(), x.options()) : at::Tensor(),
            wanted.weight ? at::zeros_like(weight) : at::Tensor(), bias};
  }
  const at::Tensor written = conv.transposed ? fitted(gradient, conv, cut, /*to_outputs=*/false) : gradient;
  detail::Replaced arguments = local_arguments(conv, cut);
  arguments.insert(arguments.end(), {{"grad_output", written},
                                     {"input", rows},
                                     {"weight", weight},
                                     {"output_mask", c10::List<bool>({wanted.input, wanted.weight, false})}});
  const Stack results = run_local(op, call, arguments);
  return {results[0].toTensor(), results[1].toTensor(), bias};
}

bool run_convolution_backward(const c10::OperatorHandle& op, Stack& stack) {
  const OpCall call(op, stack);
  const at::Tensor input = call.tensor_value("input");
  if (input.dim() < 3 || !detail::is_cut_in_space(call, size_t(input.dim()) - 2)) return false;
  const std::optional<Convolution> conv = read_convolution(call);
  if (!conv) return false;
  const auto mask = call.value("output_mask")->toBoolList();
  const Wanted wanted{mask[0], mask[1], mask[2]};
  const std::optional<ImageCut> cut =
      ImageCut::of(op, stack, conv->space, {.fetch = wanted.weight, .give_back = wanted.input});
  if (!cut) return false;
  at::Tensor of_input, of_weight, of_bias;
  {
    const LocalOnly guard;
    const Gradients parts = gradients_part(op, call, *conv, *cut, wanted);
    if (wanted.input) of_input = cut->wrap(0, cut->borders().give_back(parts.rows));
    of_weight = cut->wrap(1, parts.weight);
    of_bias = cut->wrap(2, parts.bias);
  }
  return detail::finish(op, stack, {of_input, of_weight, of_bias});
}

}  // namespace

std::vector<HandlerEntry> image_convolution_handlers() {
  return {
      {"aten::convolution", run_convolution},
      {"aten::convolution_backward", run_convolution_backward},
  };
}

}  // namespace serried
