// A parameter keeps its identity and its autograd state; only data, dtype and the node that adds up gradients change.
#include "serried/parallel/ddp/mixed_precision.h"

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/variable.h>

#include "serried/base/log.h"
#include "serried/tensor/making/backward_end.h"
#include "serried/tape/library_hook.h"

namespace serried::detail {
namespace {

namespace autograd = torch::autograd::impl;

}  // namespace

LowPrecision::LowPrecision(const torch::nn::Module& module, const std::set<std::string>& ignored, at::ScalarType dtype)
    : dtype_(dtype) {
  std::set<const void*> seen;
  for (const auto& item : module.named_parameters()) {
    const at::Tensor& parameter = item.value();
    if (!parameter.defined() || ignored.count(item.key()) != 0 || !parameter.is_floating_point()) continue;
    if (parameter.scalar_type() == dtype || !seen.insert(parameter.unsafeGetTensorImpl()).second) continue;
    twins_.push_back({parameter});
  }
  log::line(log::Topic::comm, "mixed precision: forward and backward run with ", twins_.size(), " parameters in ",
            dtype);
}

LowPrecision::~LowPrecision() {
  restore();
}

void LowPrecision::install_hooks() {
  for (Twin& twin : twins_) {
    if (!twin.accumulator) continue;
    hooks_.add(twin.accumulator, [self = weak_from_this()] {
      if (const auto low = self.lock()) low->restore_at_end();
    });
  }
}

void LowPrecision::lower() {
  if (lowered_) return;
  at::NoGradGuard no_grad;
  lowered_ = true;
  for (Twin& twin : twins_) lower(twin);
}

void LowPrecision::lower(Twin& twin) const {
  const at::Tensor& parameter = twin.parameter;
  twin.full = parameter.detach();
  // A change of dtype makes a parameter forget the node that adds up its gradients, and the hooks there: both nodes
  // are kept for the next time.
  twin.full_accumulator = autograd::try_get_grad_accumulator(parameter);
  parameter.set_data(twin.full.to(dtype_));
  if (!parameter.requires_grad()) return;
  if (twin.accumulator) {
    return autograd::set_grad_accumulator(parameter, c10::weak_intrusive_ptr<Node>(twin.accumulator));
  }
  twin.accumulator = autograd::grad_accumulator(parameter);
}

void LowPrecision::restore() {
  if (!lowered_) return;
  at::NoGradGuard no_grad;
  lowered_ = false;
  for (Twin& twin : twins_) {
    twin.parameter.set_data(std::exchange(twin.full, {}));
    if (twin.parameter.requires_grad()) autograd::set_grad_accumulator(twin.parameter, twin.full_accumulator);
    at::Tensor& grad = twin.parameter.mutable_grad();
    if (grad.defined()) grad = grad.to(twin.parameter.scalar_type());
  }
}

void LowPrecision::restore_at_end() {
  if (awaits_end_) return;
  awaits_end_ = true;
  when_backward_ends([self = weak_from_this()](bool /*completed*/) {
    const auto low = self.lock();
    if (!low) return;
    low->awaits_end_ = false;
    low->restore();
  });
}

void LowPrecision::follow(const std::vector<at::Tensor>& outputs) {
  const bool comes_back = on_gradient_of(outputs, [self = weak_from_this()] {
    const auto low = self.lock();
    if (!low) return;
    low->lower();
    low->restore_at_end();
  });
  if (!comes_back) restore();
}

void cast_buffers(const torch::nn::Module& module, const std::set<std::string>& ignored, at::ScalarType dtype) {
  at::NoGradGuard no_grad;
  log::line(log::Topic::comm, "mixed precision: buffers are in ", dtype);
  for (const auto& item : module.named_buffers()) {
    const at::Tensor& buffer = item.value();
    if (!buffer.defined() || ignored.count(item.key()) != 0 || !buffer.is_floating_point()) continue;
    if (buffer.scalar_type() != dtype) buffer.set_data(buffer.to(dtype));
  }
}

}  // namespace serried::detail
