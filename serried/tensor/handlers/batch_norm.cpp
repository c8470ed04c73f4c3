// Batch norm in training where the batch is cut: statistics over all ranks, exact for uneven and empty parts.
#include <ATen/ops/_native_batch_norm_legit_no_training.h>
#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/native_batch_norm.h>
#include <ATen/ops/native_batch_norm_backward.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/var_mean.h>
#include <ATen/ops/zeros.h>

#include "serried/tape/state_update.h"
#include "serried/tensor/dispatch/handlers.h"
#include "serried/tensor/handlers/batch_layout.h"

namespace serried {
namespace {

using c10::IValue;
using detail::BatchLayout;
using detail::OpCall;
using torch::jit::Stack;

std::vector<IValue> top(const c10::OperatorHandle& op, const Stack& stack) {
  return {stack.end() - int64_t(op.schema().arguments().size()), stack.end()};
}

at::ScalarType accumulate_type(const at::Tensor& t) {
  return t.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

at::Tensor cast(const at::Tensor& t, at::ScalarType dtype) {
  return t.defined() ? t.to(dtype) : t;
}

// Per channel, seen beside an input of `ndim` dims.
at::Tensor beside(const at::Tensor& channels, int64_t ndim) {
  std::vector<int64_t> sizes(size_t(ndim), 1);
  sizes[1] = -1;
  return channels.numel() == 0 ? channels : channels.view(sizes);
}

struct Statistics {
  at::Tensor mean, variance;  // of this rank's channels, over all ranks
};

// Means first, then squares around the common mean: as exact as one pass over the whole.
Statistics statistics(const BatchLayout& layout, const at::Tensor& x) {
  const at::ScalarType dtype = accumulate_type(x);
  const double share = layout.count_here() / layout.count();
  const auto zeros = [&] { return at::zeros({x.size(1)}, x.options().dtype(dtype)); };
  at::Tensor here_mean = zeros();
  at::Tensor here_variance = zeros();
  if (x.numel() > 0) {
    std::tie(here_variance, here_mean) = at::var_mean(x.to(dtype), layout.reduced_dims(), at::Scalar(0), false);
  }
  if (!layout.cuts_batch()) return {here_mean, here_variance};
  const at::Tensor mean = layout.sum_over_ranks(here_mean * share);
  const at::Tensor offset = here_mean - mean;
  return {mean, layout.sum_over_ranks((here_variance + offset * offset) * share)};
}

// A plain tensor (ImplicitReplication) gets the values of all channels.
at::Tensor like_running(const at::Tensor& running, const at::Tensor& local, const BatchLayout& layout) {
  const at::Tensor fresh = local.to(running.scalar_type());
  return dtensor_meta(running) != nullptr ? layout.wrap_channels(fresh) : layout.whole_channels(fresh);
}

struct Running {
  at::Tensor mean, variance;
};

Running advanced(const OpCall& arguments, const BatchLayout& layout, const Statistics& now) {
  const double momentum = arguments.number("momentum");
  const double unbiased = layout.count() / (layout.count() - 1);
  const auto advance = [&](const at::Tensor& running, const at::Tensor& fresh) {
    return running.defined() ? at::add(at::mul(running, 1 - momentum), like_running(running, fresh, layout), momentum)
                             : running;
  };
  return {advance(arguments.tensor_value("running_mean"), now.mean),
          advance(arguments.tensor_value("running_var"), now.variance * unbiased)};
}

at::ScalarType saved_type(const OpCall& arguments, const at::Tensor& x) {
  for (const char* name : {"weight", "running_mean"}) {
    const at::Tensor t = arguments.tensor_value(name);
    if (t.defined()) return t.scalar_type();
  }
  return x.scalar_type();
}

// All ranks move weights, also those that then have nothing to do.
at::Tensor normalise(const OpCall& arguments, const BatchLayout& layout, const at::Tensor& x, const Statistics& with) {
  const at::ScalarType dtype = accumulate_type(x);
  const at::Tensor weight = cast(layout.local_channels(arguments.tensor_value("weight")), dtype);
  const at::Tensor bias = cast(layout.local_channels(arguments.tensor_value("bias")), dtype);
  if (x.numel() == 0) return at::empty_like(x);
  return std::get<0>(at::native_batch_norm(x, weight, bias, with.mean, with.variance, /*training=*/false, 0.0,
                                           arguments.number("eps")));
}

bool starts_with(const std::string& text, const char* head) {
  return text.rfind(head, 0) == 0;
}

// native_batch_norm writes its running statistics without saying so in its schema: rules would lose the update.
bool forward(const c10::OperatorHandle& op, Stack& stack) {
  const std::vector<IValue> values = top(op, stack);
  const OpCall arguments(op.schema(), values);
  const at::Tensor input = arguments.tensor_value("input");
  if (!arguments.flag("training", true) || dtensor_meta(input) == nullptr) return false;
  const BatchLayout layout(input);
  const bool has_running = arguments.tensor_value("running_mean").defined();
  if (!layout.cuts_batch() && !has_running) return false;

  const at::Tensor x = layout.local(input);
  const Statistics now = statistics(layout, x);
  const at::ScalarType saved = saved_type(arguments, x);
  std::vector<IValue> results = {
      layout.wrap_input(normalise(arguments, layout, x, now)),
      layout.wrap_channels(now.mean.to(saved)),
      layout.wrap_channels((now.variance + arguments.number("eps")).rsqrt().to(saved)),
  };
  const std::string& name = op.schema().name();
  if (starts_with(name, "aten::_batch_norm")) results.push_back(layout.wrap_whole(at::empty({0}, at::kByte)));
  if (has_running) {
    const tape::StateUpdate update;
    const Running next = advanced(arguments, layout, now);
    if (name.find("functional") != std::string::npos) {
      results.insert(results.end(), {next.mean, next.variance});
    } else {
      arguments.tensor_value("running_mean").copy_(next.mean);
      arguments.tensor_value("running_var").copy_(next.variance);
    }
  }
  torch::jit::drop(stack, values.size());
  stack.insert(stack.end(), results.begin(), results.end());
  return true;
}

// Outside training nothing is written, whatever the schema says.
bool forward_or_evaluate(const c10::OperatorHandle& op, Stack& stack) {
  const std::vector<IValue> values = top(op, stack);
  const OpCall arguments(op.schema(), values);
  if (arguments.flag("training", true)) return forward(op, stack);
  const auto [out, mean, invstd] = at::_native_batch_norm_legit_no_training(
      arguments.tensor_value("input"), arguments.tensor_value("weight"), arguments.tensor_value("bias"),
      arguments.tensor_value("running_mean"), arguments.tensor_value("running_var"), arguments.number("momentum"),
      arguments.number("eps"));
  return detail::finish(op, stack, {out, mean, invstd});
}

struct Gradients {
  at::Tensor input;  // as if mean and variance were constant
  at::Tensor sums;   // [2, channels]: of the gradient, and of the gradient times the normalised input
};

Gradients constant_gradients(const at::Tensor& gradient, const at::Tensor& x, const at::Tensor& weight,
                             const Statistics& with) {
  if (x.numel() == 0) return {at::empty_like(x), at::zeros({2, x.size(1)}, with.mean.options())};
  auto [input, of_weight, of_bias] =
      at::native_batch_norm_backward(gradient, x, weight, with.mean, with.variance, {}, {}, /*train=*/false,
                                     /*eps=*/0.0, {true, true, true});
  return {input, at::stack({of_bias, of_weight}).to(with.mean.scalar_type())};
}

// What the mean and the variance, which depend on every element, take away.
void subtract_statistics(const BatchLayout& layout, const at::Tensor& x, const Statistics& with,
                         const at::Tensor& factor, Gradients& gradients) {
  if (x.numel() == 0) return;
  const int64_t ndim = x.dim();
  const at::Tensor mean_gradient = gradients.sums[0] * factor / layout.count();
  const at::Tensor scale = gradients.sums[1] * factor / with.variance.sqrt() / layout.count();
  at::Tensor offset = x.to(with.mean.scalar_type()) - beside(with.mean, ndim);
  offset.mul_(beside(scale, ndim)).add_(beside(mean_gradient, ndim));
  gradients.input.sub_(offset);
}

bool backward(const c10::OperatorHandle& op, Stack& stack) {
  const std::vector<IValue> values = top(op, stack);
  const OpCall arguments(op.schema(), values);
  const at::Tensor input = arguments.tensor_value("input");
  const bool training = arguments.flag("train", arguments.flag("update", true));
  if (!training || dtensor_meta(input) == nullptr) return false;
  const BatchLayout layout(input);
  if (!layout.cuts_batch()) return false;

  const at::Tensor x = layout.local(input);
  const at::ScalarType dtype = accumulate_type(x);
  const bool is_native = arguments.has("save_invstd");
  const at::Tensor deviation =
      cast(layout.local_channels(arguments.tensor_value(is_native ? "save_invstd" : "save_var")), dtype);
  const Statistics with = {cast(layout.local_channels(arguments.tensor_value("save_mean")), dtype),
                           (deviation * deviation).reciprocal()};
  const at::Tensor weight = cast(layout.local_channels(arguments.tensor_value("weight")), dtype);
  Gradients gradients = constant_gradients(layout.local(arguments.tensor_value("grad_out")), x, weight, with);
  gradients.sums = layout.sum_over_ranks(gradients.sums);
  subtract_statistics(layout, x, with, weight.defined() ? deviation * weight : deviation, gradients);

  const auto mask = arguments.value("output_mask")->toBoolList();
  const at::ScalarType saved = saved_type(arguments, x);
  const auto channels = [&](int64_t row, bool wanted) {
    return wanted ? layout.wrap_channels(gradients.sums[row].to(saved).contiguous()) : at::Tensor();
  };
  const at::Tensor of_input = mask[0] ? layout.wrap_input(gradients.input) : at::Tensor();
  return detail::finish(op, stack, {of_input, channels(1, mask[1]), channels(0, mask[2])});
}

}  // namespace

std::vector<HandlerEntry> batch_norm_handlers() {
  return {
      {"aten::_batch_norm_with_update", forward},
      {"aten::_batch_norm_with_update_functional", forward},
      {"aten::_native_batch_norm_legit", forward_or_evaluate},
      {"aten::_native_batch_norm_legit.no_stats", forward},
      {"aten::_native_batch_norm_legit_functional", forward},
      {"aten::batch_norm_backward", backward},
      {"aten::native_batch_norm", forward},
      {"aten::native_batch_norm_backward", backward},
  };
}

}  // namespace serried
