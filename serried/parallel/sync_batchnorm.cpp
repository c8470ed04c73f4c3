// Batch normalisation over ranks: the mark of converted modules, the op that looks for it, the module.
#include "serried/parallel/sync_batchnorm.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/batch_norm_compositeimplicitautograd_dispatch.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>

#include "serried/base/error.h"
#include "serried/parallel/sync_batchnorm_ops.h"

namespace serried {
namespace {

using OptionalTensor = std::optional<at::Tensor>;

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
    return detail::sync_batch_norm(input,
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
    return detail::sync_batch_norm(input, {weight, bias, running_mean, running_var, momentum, options.eps()}, group_);
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
