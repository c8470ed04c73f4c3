// Batch normalisation over ranks: local statistics, one collective, LibTorch's kernels for given statistics.
#include "serried/parallel/sync_batchnorm_ops.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "serried/base/error.h"
#include "serried/comm/collectives/collectives.h"
#include "serried/tape/tape.h"

namespace serried::detail {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Of all ranks' batches together; mean and (biased) variance in double, so that combining them loses nothing.
struct Statistics {
  Tensor count;  // values per channel; a tensor, because ranks whose step is replayed must see it change
  Tensor mean;
  Tensor variance;
  double eps = 0;  // added to the variance
};

// Low precision inputs are normalised with float statistics, as LibTorch's kernels do it.
at::ScalarType parameter_dtype(const Tensor& input) {
  return input.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

Tensor as_parameter(const Tensor& t, const Tensor& input) {
  return t.defined() ? t.to(parameter_dtype(input)) : t;
}

void check_input(const Tensor& input, const BatchNormArguments& arguments) {
  if (input.dim() < 2) {
    raise<c10::ValueError>({"SyncBatchNorm", c10::str("the input has sizes ", input.sizes(), ", without a channel dim"),
                            "pass [batch, channel, ...]"});
  }
  for (const Tensor& t : {arguments.weight, arguments.bias, arguments.running_var}) {
    if (!t.defined() || t.numel() == input.size(1)) continue;
    raise<c10::ValueError>({"SyncBatchNorm",
                            c10::str("the input has sizes ", input.sizes(), ", that is ", input.size(1),
                                     " channels, but the module has ", t.numel()),
                            "make dim 1 of the input the channels, or construct the module for as many"});
  }
}

// For checks only: nothing that is computed may depend on it.
int64_t count_on_host(const Statistics& all) {
  const tape::Pause no_part_of_a_step;
  return int64_t(all.count.item<double>());
}

void check_count(int64_t count, const Tensor& input, const Group& group) {
  if (count != 1) return;
  raise<c10::ValueError>({"SyncBatchNorm",
                          c10::str("Expected more than 1 value per channel when training, but all ", group->getSize(),
                                   " ranks together have one (input sizes here: ", input.sizes(), ")"),
                          "use a larger batch, or call eval() on the module"});
}

// [count, mean of each channel, variance of each channel]; zeros for an empty batch.
Tensor local_statistics(const Tensor& input) {
  const int64_t channels = input.size(1);
  const Tensor packed = at::zeros({1 + 2 * channels}, input.options().dtype(at::kDouble));
  if (input.numel() == 0) return packed;
  // Running statistics are passed only for their dtype, which the results get.
  const Tensor unused = at::zeros({channels}, input.options().dtype(parameter_dtype(input)));
  const auto [mean, variance] = at::batch_norm_update_stats(input, unused, unused.clone(), /*momentum=*/0);
  packed[0].fill_(input.numel() / channels);
  packed.narrow(0, 1, channels).copy_(mean);
  packed.narrow(0, 1 + channels, channels).copy_(variance);
  return packed;
}

// Squares are of differences to the mean, never of the values: nothing cancels where the mean is large.
Statistics combined_statistics(const Tensor& input, double eps, const Group& group) {
  const Tensor mine = local_statistics(input);
  const Tensor all = at::empty({group->getSize(), mine.numel()}, mine.options());
  all_gather_into(all, mine, group);
  const int64_t channels = input.size(1);
  const Tensor counts = all.narrow(1, 0, 1);
  const Tensor means = all.narrow(1, 1, channels);
  const Tensor variances = all.narrow(1, 1 + channels, channels);
  const Tensor count = counts.sum();
  const Tensor shares = counts / count.clamp_min(1);
  const Tensor mean = (shares * means).sum(0);
  return {count, mean, (shares * (variances + (means - mean).square())).sum(0), eps};
}

void update_average(const Tensor& running, const Tensor& value, double momentum) {
  running.copy_(at::lerp(running.to(at::kDouble), value, momentum));
}

void update_running(const BatchNormArguments& arguments, const Statistics& all) {
  if (!arguments.running_var.defined()) return;
  update_average(arguments.running_mean, all.mean, arguments.momentum);
  const Tensor unbiased = all.count / (all.count - 1);
  update_average(arguments.running_var, all.variance * unbiased, arguments.momentum);
}

// LibTorch's kernel for given statistics: one pass, any memory format, mixed dtypes.
Tensor normalise(const Tensor& input, const Tensor& weight, const Tensor& bias, const Statistics& all) {
  if (input.numel() == 0) return at::empty_like(input);
  return std::get<0>(at::native_batch_norm(input, as_parameter(weight, input), as_parameter(bias, input),
                                           as_parameter(all.mean, input), as_parameter(all.variance, input),
                                           /*training=*/false, /*momentum=*/0, all.eps));
}

struct Gradients {
  Tensor input;
  Tensor weight;  // the sum of grad_output * normalised input
  Tensor bias;    // the sum of grad_output
};

// As if the statistics were constants; weight and bias gradients are already right.
Gradients constant_statistics_gradients(const Tensor& grad_output, const Tensor& input, const Tensor& weight,
                                        const Statistics& all) {
  if (input.numel() == 0) {
    const Tensor nothing = at::zeros({input.size(1)}, input.options().dtype(parameter_dtype(input)));
    return {at::empty_like(input), nothing, nothing};
  }
  auto [grad_input, grad_weight, grad_bias] = at::native_batch_norm_backward(
      grad_output, input, as_parameter(weight, input), as_parameter(all.mean, input), as_parameter(all.variance, input),
      {}, {}, /*train=*/false, all.eps, {true, true, true});
  return {grad_input, grad_weight, grad_bias};
}

// What flows back through mean and variance, which all values of all ranks share. With x' the normalised input:
//     -weight / std * (sum(grad) + x' * sum(grad * x')) / count
// It is itself a batch normalisation, with another weight and bias. `sums` has the second sum, then the first.
Tensor gradient_of_statistics(const Tensor& input, const Tensor& weight, const Tensor& sums, const Statistics& all) {
  Tensor scale = (all.variance + all.eps).rsqrt() / -all.count;
  if (weight.defined()) scale = scale * weight;
  return normalise(input, scale * sums[0], scale * sums[1], all);
}

Tensor in_dtype_of(const Tensor& gradient, const Tensor& parameter) {
  return parameter.defined() ? gradient.to(parameter.scalar_type()) : Tensor();
}

struct SyncBatchNormFunction : torch::autograd::Function<SyncBatchNormFunction> {
  // Weight and bias stand beside `arguments` because autograd looks only at tensors; optional, as it takes no
  // undefined.
  static Tensor forward(AutogradContext* context, const Tensor& input, const std::optional<Tensor>& /*weight*/,
                        const std::optional<Tensor>& /*bias*/, const BatchNormArguments& arguments,
                        const Group& group) {
    const Statistics all = combined_statistics(input, arguments.eps, group);
    const int64_t count = count_on_host(all);
    check_count(count, input, group);
    if (count > 0) update_running(arguments, all);
    context->save_for_backward({input, arguments.weight, arguments.bias, all.count, all.mean, all.variance});
    context->saved_data["eps"] = all.eps;
    context->saved_data["group"] = c10::IValue::make_capsule(group);
    return normalise(input, arguments.weight, arguments.bias, all);
  }

  static variable_list backward(AutogradContext* context, const variable_list& grad_outputs) {
    if (at::GradMode::is_enabled()) {
      raise<c10::NotImplementedError>(
          {"SyncBatchNorm", "its gradient has no gradient of its own", "call backward without create_graph"});
    }
    const variable_list saved = context->get_saved_variables();
    const Tensor &input = saved[0], &weight = saved[1], &bias = saved[2];
    const Statistics all{saved[3], saved[4], saved[5], context->saved_data["eps"].toDouble()};
    const Group group =
        c10::static_intrusive_pointer_cast<c10d::ProcessGroup>(context->saved_data["group"].toCapsule());
    const Gradients gradients = constant_statistics_gradients(grad_outputs[0], input, weight, all);
    if (context->needs_input_grad(0)) {
      const Tensor sums = at::stack({gradients.weight, gradients.bias}).to(at::kDouble);
      all_reduce_(sums, group);
      gradients.input.add_(gradient_of_statistics(input, weight, sums, all));
    }
    return {gradients.input, in_dtype_of(gradients.weight, weight), in_dtype_of(gradients.bias, bias), {}, {}};
  }
};

}  // namespace

Tensor sync_batch_norm(const Tensor& input, const BatchNormArguments& arguments, const Group& group) {
  check_input(input, arguments);
  return SyncBatchNormFunction::apply(input, std::optional(arguments.weight), std::optional(arguments.bias), arguments,
                                      group);
}

}  // namespace serried::detail
