// One fused op per batch, plain ops for sparse gradients and for short dtypes.
#include "serried/optim/sgd.h"

#include <ATen/ATen.h>
#include <torch/optim/serialize.h>

#include <bit>

#include "serried/base/error.h"
#include "serried/base/hash.h"
#include "serried/tape/facts.h"

namespace serried {
namespace {

using torch::optim::SGDOptions;
using torch::optim::SGDParamState;

void check_sgd(const SGDOptions& options) {
  const auto require = [](bool holds, const std::string& what, const char* fix) {
    if (!holds) raise<c10::ValueError>({"SGD", what, fix});
  };
  require(options.lr() >= 0, c10::str("lr is ", options.lr()), "pass 0 or more");
  require(options.momentum() >= 0, c10::str("momentum is ", options.momentum()), "pass 0 or more");
  require(options.weight_decay() >= 0, c10::str("weight_decay is ", options.weight_decay()), "pass 0 or more");
  require(!options.nesterov() || (options.momentum() > 0 && options.dampening() == 0),
          c10::str("nesterov with momentum ", options.momentum(), " and dampening ", options.dampening()),
          "pass a momentum above 0 and no dampening");
}

// The first step takes the whole gradient, the later ones (1 - dampening) of it. As a captured step is repeated as it
// is, the buffer starts with what makes the first step like the others.
void start_momentum(const at::Tensor& buffer, const at::Tensor& value, const at::Tensor& grad,
                    const SGDOptions& options) {
  if (options.dampening() == 0) return;
  const tape::Pause off_tape;
  const double share = options.dampening() / options.momentum();
  buffer.add_(grad, share);
  if (options.weight_decay() != 0) buffer.add_(value, share * options.weight_decay());
}

}  // namespace

SGD::SGD(const std::vector<torch::optim::OptimizerParamGroup>& groups, SGDOptions defaults)
    : CapturableOptimizer("SGD", groups, std::make_unique<SGDOptions>(defaults)) {
  check_sgd(defaults);
  for (const auto& group : param_groups_) check_sgd(static_cast<const SGDOptions&>(group.options()));
}

std::vector<at::Tensor> SGD::momentum_buffers(const Batch& batch) {
  const auto& options = static_cast<const SGDOptions&>(param_groups_[batch.group].options());
  std::vector<at::Tensor> buffers;
  if (options.momentum() == 0) return buffers;
  for (size_t i = 0; i < batch.params.size(); ++i) {
    auto& slot = state_[batch.params[i].unsafeGetTensorImpl()];
    if (!slot) slot = std::make_unique<SGDParamState>();
    auto& state = static_cast<SGDParamState&>(*slot);
    const bool is_new = !state.momentum_buffer().defined();
    state.momentum_buffer(state_tensor(state.momentum_buffer(), batch.values[i], "momentum_buffer"));
    if (is_new) start_momentum(state.momentum_buffer(), batch.values[i], batch.grads[i], options);
    buffers.push_back(state.momentum_buffer());
  }
  return buffers;
}

void SGD::update_sparse(const Batch& batch) {
  const auto& options = static_cast<const SGDOptions&>(param_groups_[batch.group].options());
  if (options.weight_decay() != 0) {
    raise<c10::ValueError>(
        {"SGD",
         c10::str("weight_decay ", options.weight_decay(), " with a gradient of layout ", batch.kind.grad_layout),
         "put this parameter into a group of its own without weight decay"});
  }
  const std::vector<at::Tensor> buffers = momentum_buffers(batch);
  const at::Tensor& lr = learning_rate(batch.group);
  for (size_t i = 0; i < batch.values.size(); ++i) {
    const at::Tensor& grad = batch.grads[i];
    if (buffers.empty()) {
      batch.values[i].sub_(grad.mul(lr));
      continue;
    }
    const at::Tensor& buffer = buffers[i];
    buffer.mul_(options.momentum()).add_(grad, 1 - options.dampening());
    const at::Tensor change = options.nesterov() ? buffer.mul(options.momentum()).add_(grad) : buffer;
    batch.values[i].sub_(change.mul(lr));
  }
}

// In float, rounding only what is stored, as fused ops do.
void SGD::update_short(const Batch& batch) {
  const auto& options = static_cast<const SGDOptions&>(param_groups_[batch.group].options());
  const std::vector<at::Tensor> buffers = momentum_buffers(batch);
  const at::Tensor& lr = learning_rate(batch.group);
  for (size_t i = 0; i < batch.values.size(); ++i) {
    const at::Tensor& value = batch.values[i];
    at::Tensor change = batch.grads[i].to(at::kFloat);
    if (options.weight_decay() != 0) change = change.add(value, options.weight_decay());
    if (!buffers.empty()) {
      const at::Tensor sum = buffers[i].to(at::kFloat).mul_(options.momentum()).add_(change, 1 - options.dampening());
      buffers[i].copy_(sum);
      change = options.nesterov() ? change.add(sum, options.momentum()) : sum;
    }
    value.copy_(value.to(at::kFloat).sub_(change.mul(lr)));
  }
}

auto SGD::update(const Batch& batch) -> HostWork {
  if (batch.kind.grad_layout != at::kStrided) {
    update_sparse(batch);
    return {};
  }
  // LibTorch 2.13's fused kernel leaves most of such a parameter as it was: pytorch/pytorch#191763.
  if (batch.kind.device.is_cpu() && at::isReducedFloatingType(batch.kind.dtype)) {
    update_short(batch);
    return {};
  }
  const auto& options = static_cast<const SGDOptions&>(param_groups_[batch.group].options());
  const std::vector<at::Tensor> buffers = momentum_buffers(batch);
  at::_fused_sgd_(detail::as_real(batch.values), detail::as_real(batch.grads), detail::as_real(buffers),
                  options.weight_decay(), options.momentum(), learning_rate(batch.group), options.dampening(),
                  options.nesterov(), /*maximize=*/false, /*is_first_step=*/false);
  detail::bump_versions(batch.values);
  return {};
}

uint64_t SGD::constants(const torch::optim::OptimizerOptions& base) const {
  const auto& options = static_cast<const SGDOptions&>(base);
  uint64_t hash = options.nesterov();
  for (double number : {options.momentum(), options.dampening(), options.weight_decay()}) {
    hash = mix_hash(hash, std::bit_cast<uint64_t>(number));
  }
  return hash;
}

uint64_t SGD::state_identity(const at::Tensor& param) const {
  const auto found = state_.find(param.unsafeGetTensorImpl());
  if (found == state_.end()) return 0;
  return tape::identity_of(static_cast<const SGDParamState&>(*found->second).momentum_buffer());
}

void SGD::save(torch::serialize::OutputArchive& archive) const {
  torch::optim::serialize<SGDParamState, SGDOptions>(archive, *this);
}

void SGD::load(torch::serialize::InputArchive& archive) {
  torch::optim::serialize<SGDParamState, SGDOptions>(archive, *this);
}

}  // namespace serried
