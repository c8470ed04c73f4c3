// Resizes of images that are cut along their space: one dim after the other, each as a sum of a few rows per output.
#include <ATen/ATen.h>

#include "serried/tensor/dispatch/local_only.h"
#include "serried/tensor/handlers/part_reduction.h"
#include "serried/tensor/images/local_call.h"
#include "serried/tensor/images/taps.h"
#include "serried/tensor/parts.h"

namespace serried {
namespace {

using detail::ImageCut;
using detail::LocalOnly;
using detail::OpCall;
using detail::ResizedDim;
using detail::Space;
using detail::Taps;
using torch::jit::Stack;

// The largest number of a row that is a float.
constexpr int64_t kMostRows = int64_t(1) << 24;

// Where linear resizes copy rows whatever the scale says.
bool keeps_rows(const OpCall& call, const Space& space, size_t d) {
  return call.name().find("linear") != std::string::npos && space.outputs[d] == space.inputs[d];
}

struct Resize {
  std::vector<Taps> taps;  // per dim of space
  Space space;
};

std::optional<double> scale_of(const OpCall& call, size_t d, size_t ndim) {
  static constexpr const char* kNames[] = {"scales_d", "scales_h", "scales_w"};
  const char* name = ndim == 1 ? "scales" : kNames[3 - ndim + d];
  return call.optional<double>(name);
}

c10::OperatorHandle forward_of(const c10::OperatorHandle& op) {
  std::string name = op.schema().name();
  const std::string ending = "_backward";
  if (name.ends_with(ending)) name.resize(name.size() - ending.size());
  return c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), "");
}

// The sizes of the image and of the resized one; none for calls that the op itself would refuse.
std::optional<Space> resized_space(const OpCall& call) {
  const size_t ndim = detail::space_ndim_of(call.name());
  const at::Tensor given = call.argument(0).toTensor();
  const std::optional<Sizes> outputs = call.integers("output_size");
  if (!detail::is_real(given) || given.dim() != int64_t(ndim) + 2 || given.numel() == 0) return std::nullopt;
  if (!outputs || outputs->size() != ndim) return std::nullopt;
  Space space{detail::last_sizes(given.sizes(), ndim), *outputs, {}};
  if (call.has("grad_output")) {
    const std::optional<Sizes> inputs = call.integers("input_size");
    if (!inputs || inputs->size() != ndim + 2 || space.inputs != *outputs) return std::nullopt;
    if ((*inputs)[0] != given.size(0) || (*inputs)[1] != given.size(1)) return std::nullopt;
    space.inputs = detail::last_sizes(*inputs, ndim);
  }
  for (size_t d = 0; d < ndim; ++d) {
    if (space.inputs[d] < 1 || space.outputs[d] < 1) return std::nullopt;
  }
  return space;
}

Taps taps_of_call(const c10::OperatorHandle& op, const OpCall& call, const Space& space, size_t d,
                  const at::TensorOptions& options) {
  const size_t ndim = space.ndim();
  const bool is_nearest = !call.has("align_corners");
  const ResizedDim dim{.inputs = space.inputs[d],
                       .outputs = space.outputs[d],
                       .align_corners = is_nearest ? std::nullopt : std::optional(call.flag("align_corners")),
                       .scale = keeps_rows(call, space, d) ? std::nullopt : scale_of(call, d, ndim)};
  if (!is_nearest) return taps_of(forward_of(op), dim, d, ndim, options);
  if (call.has("grad_output")) return taps_of_nearest_backward(op, dim, d, ndim, options);
  const detail::NearestKernel kernel = detail::nearest_kernel(call.argument(0).toTensor(), space.outputs);
  return taps_of_nearest(op, dim, d, ndim, options, kernel);
}

std::optional<Resize> read_resize(const c10::OperatorHandle& op, const OpCall& call) {
  std::optional<Space> space = resized_space(call);
  if (!space) return std::nullopt;
  const size_t ndim = space->ndim();
  const at::TensorOptions options = part_of(call.argument(0).toTensor()).options();
  Resize resize{{}, std::move(*space)};
  const LocalOnly guard;
  for (size_t d = 0; d < ndim; ++d) {
    if (resize.space.inputs[d] > kMostRows) return std::nullopt;
    resize.taps.push_back(taps_of_call(op, call, resize.space, d, options));
    if (int64_t(resize.taps[d].rows[0].size()) != resize.space.outputs[d]) return std::nullopt;
  }
  resize.space.rows = [taps = resize.taps](size_t d, const Span& outputs) { return taps[d].rows_read(outputs); };
  return resize;
}

// From the last dim to the first, as the ops do.
at::Tensor resized_part(const Resize& resize, const ImageCut& cut) {
  const at::Tensor x = cut.local("self");
  at::Tensor y = cut.borders().fetch(x, 0);
  if (y.numel() == 0) return at::zeros(cut.output_sizes(x.sizes()), x.options());
  y = y.to(detail::accumulated(x.scalar_type()));
  for (size_t d = resize.taps.size(); d-- > 0;) {
    if (resize.taps[d].changes_nothing(resize.space.inputs[d]) && cut.rows(d) == cut.outputs(d)) continue;
    y = apply_taps(resize.taps[d], y, int64_t(d) + 2, cut.rows(d).begin, cut.outputs(d));
  }
  y = y.to(x.scalar_type());
  return y.is_same(x) ? y.clone() : y;  // who writes into a resize that changes nothing does not mean the image
}

bool run_resize(const c10::OperatorHandle& op, Stack& stack) {
  const OpCall call(op, stack);
  if (!detail::is_cut_in_space(call, detail::space_ndim_of(call.name()))) return false;
  const std::optional<Resize> resize = read_resize(op, call);
  if (!resize) return false;
  const bool by_layout =
      !call.has("align_corners") && detail::goes_by_layout(call.argument(0).toTensor(), resize->space.outputs);
  const std::optional<ImageCut> cut =
      ImageCut::of(op, stack, resize->space, {.fetch = true, .give_back = false, .at_any_cost = by_layout});
  if (!cut) return false;
  at::Tensor result;
  {
    const LocalOnly guard;
    result = cut->wrap(0, resized_part(*resize, *cut));
  }
  return detail::finish(op, stack, {result});
}

at::Tensor resize_gradient(const Resize& resize, const ImageCut& cut) {
  at::Tensor gradient = cut.local("grad_output");
  const at::ScalarType dtype = gradient.scalar_type();
  gradient = gradient.to(detail::accumulated(dtype));
  for (size_t d = 0; d < resize.taps.size(); ++d) {
    gradient = apply_taps_back(resize.taps[d], gradient, int64_t(d) + 2, cut.rows(d), cut.outputs(d));
  }
  return cut.borders().give_back(gradient).to(dtype);
}

bool run_resize_backward(const c10::OperatorHandle& op, Stack& stack) {
  const OpCall call(op, stack);
  if (!detail::is_cut_in_space(call, detail::space_ndim_of(call.name()))) return false;
  const std::optional<Resize> resize = read_resize(op, call);
  if (!resize) return false;
  const std::optional<ImageCut> cut = ImageCut::of(op, stack, resize->space, {.fetch = false, .give_back = true});
  if (!cut) return false;
  at::Tensor result;
  {
    const LocalOnly guard;
    result = cut->wrap(0, resize_gradient(*resize, *cut));
  }
  return detail::finish(op, stack, {result});
}

}  // namespace

std::vector<HandlerEntry> image_resize_handlers() {
  std::vector<HandlerEntry> entries;
  for (const char* op :
       {"aten::_upsample_nearest_exact1d", "aten::_upsample_nearest_exact2d", "aten::_upsample_nearest_exact3d",
        "aten::upsample_bicubic2d", "aten::upsample_bilinear2d", "aten::upsample_linear1d", "aten::upsample_nearest1d",
        "aten::upsample_nearest2d", "aten::upsample_nearest3d", "aten::upsample_trilinear3d"}) {
    entries.push_back({op, run_resize});
  }
  for (const char* op : {"aten::_upsample_nearest_exact1d_backward", "aten::_upsample_nearest_exact2d_backward",
                         "aten::_upsample_nearest_exact3d_backward", "aten::upsample_bicubic2d_backward",
                         "aten::upsample_bilinear2d_backward", "aten::upsample_linear1d_backward",
                         "aten::upsample_nearest1d_backward", "aten::upsample_nearest2d_backward",
                         "aten::upsample_nearest3d_backward", "aten::upsample_trilinear3d_backward"}) {
    entries.push_back({op, run_resize_backward});
  }
  return entries;
}

}  // namespace serried
