// Average and max pools of images that are cut along their space. What padding means to them is decided per output.
#include <ATen/ATen.h>

#include <algorithm>
#include <limits>

#include "serried/tensor/dispatch/local_only.h"
#include "serried/tensor/handlers/part_reduction.h"
#include "serried/tensor/images/local_call.h"
#include "serried/tensor/images/max_indices.h"

namespace serried {
namespace {

using detail::ImageCut;
using detail::LocalOnly;
using detail::OpCall;
using detail::run_local;
using detail::Space;
using spmd::Window;
using torch::jit::Stack;

struct Pool {
  std::vector<Window> windows;  // per dim of space
  Space space;
};

std::optional<std::vector<Window>> windows_of(const OpCall& call, size_t ndim) {
  const std::optional<Sizes> given = call.integers("stride");
  const bool has_stride = given && !given->empty();  // else as large as the kernel
  const auto kernel = detail::per_dim(call, "kernel_size", ndim);
  const auto stride = detail::per_dim(call, has_stride ? "stride" : "kernel_size", ndim);
  const auto padding = detail::per_dim(call, "padding", ndim);
  const auto dilation = call.has("dilation") ? detail::per_dim(call, "dilation", ndim) : Sizes(ndim, 1);
  if (!kernel || !stride || !padding || !dilation) return std::nullopt;
  std::vector<Window> windows;
  for (size_t d = 0; d < ndim; ++d) {
    const Window window{(*kernel)[d], (*stride)[d], (*dilation)[d], (*padding)[d]};
    if (window.kernel < 1 || window.stride < 1 || window.dilation < 1) return std::nullopt;
    if (window.padding < 0 || window.padding > window.extent() / 2) return std::nullopt;
    windows.push_back(window);
  }
  return windows;
}

// None for calls that the op itself would refuse: then it does, as it refuses whole tensors.
std::optional<Pool> read_pool(const OpCall& call) {
  const size_t ndim = detail::space_ndim_of(call.name());
  const at::Tensor input = call.tensor_value("self"), gradient = call.tensor_value("grad_output");
  if (!detail::is_real(input) || input.dim() < int64_t(ndim) + 1 || input.dim() > int64_t(ndim) + 2) return {};
  const std::optional<std::vector<Window>> windows = windows_of(call, ndim);
  if (!windows || input.numel() == 0) return std::nullopt;
  if (call.value("divisor_override") != nullptr && call.integer("divisor_override") == 0) return std::nullopt;
  Pool pool{*windows, {detail::last_sizes(input.sizes(), ndim), {}, {}}};
  for (size_t d = 0; d < ndim; ++d) {
    pool.space.outputs.push_back(num_outputs((*windows)[d], pool.space.inputs[d], call.flag("ceil_mode")));
    if (pool.space.outputs[d] < 1) return std::nullopt;
  }
  pool.space.rows = [windows = pool.windows](size_t d, const Span& outputs) {
    return window_rows(windows[d], outputs);
  };
  const bool fits = !gradient.defined() || (detail::same_but_space(gradient, input, ndim) &&
                                            detail::last_sizes(gradient.sizes(), ndim) == pool.space.outputs);
  return fits ? std::optional(pool) : std::nullopt;
}

// A window that reaches beyond the image finds rows there; so windows fit as they are, whatever ceil_mode says.
c10::IValue local_padding(const Pool& pool, const ImageCut& cut) {
  Sizes padding;
  for (size_t d = 0; d < pool.windows.size(); ++d) padding.push_back(cut.is_cut(d) ? 0 : pool.windows[d].padding);
  return padding;
}

struct Prepared {
  Pool pool;
  ImageCut cut;
};

std::optional<Prepared> prepare(const c10::OperatorHandle& op, const Stack& stack, ImageCut::Exchanges exchanges) {
  const OpCall call(op, stack);
  if (!detail::is_cut_in_space(call, detail::space_ndim_of(call.name()))) return std::nullopt;
  const std::optional<Pool> pool = read_pool(call);
  if (!pool) return std::nullopt;
  const std::optional<ImageCut> cut = ImageCut::of(op, stack, pool->space, exchanges);
  return cut ? std::optional(Prepared{*pool, *cut}) : std::nullopt;
}

// What sums are divided by: the same for all outputs, or a tensor that broadcasts over space.
struct Divisor {
  int64_t of_all = 1;
  at::Tensor each;  // undefined where there is only the other
};

// Runs of equal numbers, by ops: so a recorder sees where they come from.
at::Tensor as_tensor(const std::vector<int64_t>& counts, const at::TensorOptions& options) {
  std::vector<at::Tensor> runs;
  for (size_t i = 0; i < counts.size();) {
    size_t end = i;
    while (end < counts.size() && counts[end] == counts[i]) ++end;
    runs.push_back(at::full({int64_t(end - i)}, counts[i], options));
    i = end;
  }
  return at::cat(runs);
}

Divisor divisor_of(const OpCall& call, const Pool& pool, const ImageCut& cut, const at::TensorOptions& options) {
  if (call.value("divisor_override") != nullptr) return {call.integer("divisor_override"), {}};
  const size_t ndim = pool.windows.size();
  std::vector<std::vector<int64_t>> counts;
  Divisor divisor;
  bool is_uniform = true;
  for (size_t d = 0; d < ndim; ++d) {
    counts.push_back(
        rows_averaged(pool.windows[d], pool.space.inputs[d], cut.outputs(d), call.flag("count_include_pad", true)));
    is_uniform = is_uniform && std::all_of(counts[d].begin(), counts[d].end(),
                                           [&](int64_t count) { return count == counts[d].front(); });
    if (is_uniform && !counts[d].empty()) divisor.of_all *= counts[d].front();
  }
  if (is_uniform) return divisor;
  divisor.of_all = 1;
  for (size_t d = 0; d < ndim; ++d) {
    Sizes beside(ndim, 1);
    beside[d] = int64_t(counts[d].size());
    const at::Tensor of_dim = as_tensor(counts[d], options).view(beside);
    divisor.each = d == 0 ? of_dim : divisor.each * of_dim;
  }
  return divisor;
}

at::Tensor average_part(const c10::OperatorHandle& op, const OpCall& call, const Prepared& with) {
  const at::Tensor x = with.cut.local("self");
  const at::ScalarType wide = detail::accumulated(x.scalar_type());
  const at::Tensor rows = with.cut.borders().fetch(x, 0).to(wide);
  const Sizes sizes = with.cut.output_sizes(x.sizes());
  if (rows.numel() == 0 || c10::multiply_integers(sizes) == 0) return at::zeros(sizes, x.options());
  const Divisor divisor = divisor_of(call, with.pool, with.cut, rows.options());
  const Stack results = run_local(
      op, call,
      {{"self", rows}, {"padding", local_padding(with.pool, with.cut)}, {"divisor_override", divisor.of_all}});
  const at::Tensor sums = results[0].toTensor();
  return (divisor.each.defined() ? sums / divisor.each : sums).to(x.scalar_type());
}

bool run_average(const c10::OperatorHandle& op, Stack& stack) {
  const OpCall call(op, stack);
  const std::optional<Prepared> with = prepare(op, stack, {.fetch = true, .give_back = false});
  if (!with) return false;
  at::Tensor result;
  {
    const LocalOnly guard;
    result = with->cut.wrap(0, average_part(op, call, *with));
  }
  return detail::finish(op, stack, {result});
}

// Ops look at the image's shape only; a recorder wants to know what is read all the same.
at::Tensor shape_of_rows(const ImageCut& cut, const at::Tensor& x, at::ScalarType dtype) {
  return at::zeros(cut.borders().wanted_sizes(x.sizes()), x.options().dtype(dtype));
}

at::Tensor average_gradient(const c10::OperatorHandle& op, const OpCall& call, const Prepared& with) {
  const at::Tensor gradient = with.cut.local("grad_output"), x = with.cut.local("self");
  const at::ScalarType wide = detail::accumulated(x.scalar_type());
  const at::Tensor rows = shape_of_rows(with.cut, x, wide);
  if (rows.numel() == 0 || gradient.numel() == 0) return at::zeros(rows.sizes(), rows.options());
  const Divisor divisor = divisor_of(call, with.pool, with.cut, rows.options());
  const at::Tensor sums = divisor.each.defined() ? gradient.to(wide) / divisor.each : gradient.to(wide);
  return run_local(op, call,
                   {{"grad_output", sums},
                    {"self", rows},
                    {"padding", local_padding(with.pool, with.cut)},
                    {"divisor_override", divisor.of_all}})[0]
      .toTensor();
}

template <class Gradient>
bool run_pool_backward(const c10::OperatorHandle& op, Stack& stack, Gradient gradient_part) {
  const OpCall call(op, stack);
  const std::optional<Prepared> with = prepare(op, stack, {.fetch = false, .give_back = true});
  if (!with) return false;
  at::Tensor result;
  {
    const LocalOnly guard;
    const at::Tensor held = with->cut.borders().give_back(gradient_part(op, call, *with));
    result = with->cut.wrap(0, held.to(call.tensor_value("grad_output").scalar_type()));
  }
  return detail::finish(op, stack, {result});
}

bool run_average_backward(const c10::OperatorHandle& op, Stack& stack) {
  return run_pool_backward(op, stack, average_gradient);
}

std::vector<int64_t> dilations(const Pool& pool) {
  std::vector<int64_t> all;
  for (const Window& window : pool.windows) all.push_back(window.dilation);
  return all;
}

// Never the largest: only where a window has nothing larger is its first row taken, and that may be padding.
bool run_max(const c10::OperatorHandle& op, Stack& stack) {
  const OpCall call(op, stack);
  const std::optional<Prepared> with = prepare(op, stack, {.fetch = true, .give_back = false});
  if (!with) return false;
  at::Tensor values, indices;
  {
    const LocalOnly guard;
    const at::Tensor x = with->cut.local("self");
    const at::Tensor rows = with->cut.borders().fetch(x, -std::numeric_limits<double>::infinity());
    const Sizes sizes = with->cut.output_sizes(x.sizes());
    if (rows.numel() == 0 || c10::multiply_integers(sizes) == 0) {
      values = at::zeros(sizes, x.options());
      indices = at::zeros(sizes, x.options().dtype(at::kLong));
    } else {
      const Stack results = run_local(op, call, {{"self", rows}, {"padding", local_padding(with->pool, with->cut)}});
      values = results[0].toTensor();
      indices = detail::of_whole_image(results[1].toTensor(), detail::rows_read(with->cut), with->pool.space.inputs,
                                       dilations(with->pool));
    }
    values = with->cut.wrap(0, values);
    indices = with->cut.wrap(1, indices);
  }
  return detail::finish(op, stack, {values, indices});
}

at::Tensor max_gradient(const c10::OperatorHandle& op, const OpCall& call, const Prepared& with) {
  const at::Tensor gradient = with.cut.local("grad_output"), x = with.cut.local("self");
  const at::Tensor indices = with.cut.local("indices");
  const at::Tensor rows = shape_of_rows(with.cut, x, x.scalar_type());
  if (rows.numel() == 0 || gradient.numel() == 0) return at::zeros(rows.sizes(), rows.options());
  return run_local(op, call,
                   {{"grad_output", gradient},
                    {"self", rows},
                    {"padding", local_padding(with.pool, with.cut)},
                    {"indices", detail::of_rows(indices, detail::rows_read(with.cut), with.pool.space.inputs)}})[0]
      .toTensor();
}

bool run_max_backward(const c10::OperatorHandle& op, Stack& stack) {
  return run_pool_backward(op, stack, max_gradient);
}

}  // namespace

std::vector<HandlerEntry> image_pool_handlers() {
  return {
      {"aten::avg_pool2d", run_average},          {"aten::avg_pool2d_backward", run_average_backward},
      {"aten::avg_pool3d", run_average},          {"aten::avg_pool3d_backward", run_average_backward},
      {"aten::max_pool2d_with_indices", run_max}, {"aten::max_pool2d_with_indices_backward", run_max_backward},
      {"aten::max_pool3d_with_indices", run_max}, {"aten::max_pool3d_with_indices_backward", run_max_backward},
  };
}

}  // namespace serried
