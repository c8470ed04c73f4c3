// Batch normalisation over ranks: local statistics, one collective, LibTorch's kernels for given statistics; the mark
// of converted modules, the op that looks for it, the module.
#include "serried/parallel/sync_batchnorm.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/batch_norm_compositeimplicitautograd_dispatch.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>

#include "serried/base/error.h"
#include "serried/comm/collectives/collectives.h"
#include "serried/tape/state_update.h"
#include "serried/tape/tape.h"

namespace serried {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using OptionalTensor = std::optional<Tensor>;

// What at::batch_norm takes besides its input; tensors may be undefined.
struct BatchNormArguments {
  at::Tensor weight;
  at::Tensor bias;
  at::Tensor running_mean;  // updated if running_var is defined too
  at::Tensor running_var;
  double momentum = 0.1;
  double eps = 1e-5;
};

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
  const tape::StateUpdate update;
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

// `input` normalised by the statistics of all ranks' inputs. One collective here and one in backward.
Tensor sync_batch_norm(const Tensor& input, const BatchNormArguments& arguments, const Group& group) {
  check_input(input, arguments);
  return SyncBatchNormFunction::apply(input, std::optional(arguments.weight), std::optional(arguments.bias), arguments,
                                      group);
}

// BatchNorm2dImpl::forward is not virtual, and users hold its module as a member: nothing of it can be replaced. But it
// passes its running_mean to at::batch_norm, and this stays with that tensor whatever data it is given later.
struct SyncMark final : torch::autograd::AutogradMeta {
  SyncMark(Group group_, std::weak_ptr<torch::nn::Module> module_)
      : group(std::move(group_)), module(std::move(module_)) {}

  // Without running statistics, at::batch_norm is told to train in evaluation too; PyTorch does not synchronise there.
  bool trains() const {
    const auto locked = module.lock();
    return locked == nullptr || locked->is_training();
  }

  const Group group;
  const std::weak_ptr<torch::nn::Module> module;  // of a module on the stack: nothing
};

const SyncMark* mark_of(const OptionalTensor& running_mean) {
  if (!running_mean.has_value() || !running_mean->defined()) return nullptr;
  return dynamic_cast<const SyncMark*>(running_mean->unsafeGetTensorImpl()->autograd_meta());
}

// In place of LibTorch's, whose shortcut for empty batches would leave the other ranks waiting.
at::Tensor batch_norm(const at::Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
                      const OptionalTensor& running_mean, const OptionalTensor& running_var, bool training,
                      double momentum, double eps, bool cudnn_enabled) {
  const SyncMark* mark = mark_of(running_mean);
  if (mark != nullptr && training && mark->trains()) {
    return sync_batch_norm(input,
                           {.weight = weight.value_or(at::Tensor()),
                            .bias = bias.value_or(at::Tensor()),
                            .running_mean = *running_mean,
                            .running_var = running_var.value_or(at::Tensor()),
                            .momentum = momentum,
                            .eps = eps},
                           mark->group);
  }
  const bool is_only_mark = mark != nullptr && !(running_var.has_value() && running_var->defined());
  return at::compositeimplicitautograd::batch_norm(input, weight, bias, is_only_mark ? std::nullopt : running_mean,
                                                   running_var, training, momentum, eps, cudnn_enabled);
}

template <class Norm>
void set_mark(torch::nn::Module& module, const Group& group) {
  auto* norm = dynamic_cast<Norm*>(&module);
  if (norm == nullptr) return;
  if (!norm->running_mean.defined()) {
    // Not a buffer: there is nothing to save, only something to pass to at::batch_norm.
    const c10::InferenceMode off(false);
    norm->running_mean = at::empty({0});
  }
  norm->running_mean.unsafeGetTensorImpl()->set_autograd_meta(
      std::make_unique<SyncMark>(group, module.weak_from_this()));
}

template <class Norm>
bool is_marked(const torch::nn::Module& module) {
  const auto* norm = dynamic_cast<const Norm*>(&module);
  return norm != nullptr && mark_of(norm->running_mean) != nullptr;
}

void check_sync_group(std::string_view where, const Group& group) {
  if (group != nullptr) return;
  raise<c10::ValueError>({where, "the group is null", "pass the group whose batches belong together"});
}

}  // namespace

// ADInplaceOrView: where InferenceMode leaves the autograd keys out.
TORCH_LIBRARY_FRAGMENT(aten, m) {
  for (const auto key :
       {c10::DispatchKey::AutogradCPU, c10::DispatchKey::AutogradCUDA, c10::DispatchKey::ADInplaceOrView}) {
    m.impl("batch_norm", torch::dispatch(key, TORCH_FN(batch_norm)));
  }
}

void convert_sync_batchnorm(torch::nn::Module& net, const Group& group) {
  check_sync_group("convert_sync_batchnorm", group);
  net.apply([&](torch::nn::Module& module) {
    set_mark<torch::nn::BatchNorm1dImpl>(module, group);
    set_mark<torch::nn::BatchNorm2dImpl>(module, group);
    set_mark<torch::nn::BatchNorm3dImpl>(module, group);
  });
}

bool has_sync_batchnorm(const torch::nn::Module& net) {
  bool found = false;
  net.apply([&](const torch::nn::Module& module) {
    found |= is_marked<torch::nn::BatchNorm1dImpl>(module) || is_marked<torch::nn::BatchNorm2dImpl>(module) ||
             is_marked<torch::nn::BatchNorm3dImpl>(module) ||
             dynamic_cast<const SyncBatchNormImpl*>(&module) != nullptr;
  });
  return found;
}

SyncBatchNormImpl::SyncBatchNormImpl(const torch::nn::BatchNormOptions& options_, Group group)
    : NormImplBase(options_), group_(std::move(group)) {
  check_sync_group("SyncBatchNorm", group_);
}

at::Tensor SyncBatchNormImpl::forward(const at::Tensor& input) {
  _check_input_dim(input);
  double momentum = options.momentum().value_or(0);
  if (is_training() && options.track_running_stats()) {
    num_batches_tracked += 1;
    if (!options.momentum().has_value()) momentum = 1.0 / num_batches_tracked.item<double>();
  }
  if (is_training()) {
    return sync_batch_norm(input, {weight, bias, running_mean, running_var, momentum, options.eps()}, group_);
  }
  return torch::nn::functional::detail::batch_norm(input, running_mean, running_var, weight, bias,
                                                   /*training=*/!options.track_running_stats(), momentum,
                                                   options.eps());
}

void SyncBatchNormImpl::pretty_print(std::ostream& stream) const {
  stream << std::boolalpha << "serried::SyncBatchNorm(" << options.num_features() << ", eps=" << options.eps()
         << ", momentum=";
  if (options.momentum().has_value()) {
    stream << *options.momentum();
  } else {
    stream << "None";
  }
  stream << ", affine=" << options.affine() << ", track_running_stats=" << options.track_running_stats()
         << ", ranks=" << group_->getSize() << ')';
}

void SyncBatchNormImpl::_check_input_dim(const at::Tensor& input) {
  if (input.dim() >= 2 && input.dim() <= 5) return;
  raise<c10::ValueError>({"SyncBatchNorm", c10::str("the input has ", input.dim(), " dims: sizes ", input.sizes()),
                          "pass [batch, channel] and up to three more dims"});
}

}  // namespace serried
