// Copies at the begin of a step, and the way back.
#include "serried/elastic/before_step.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>

#include <mutex>

#include "serried/checkpoint/collect.h"
#include "serried/tensor/random/random.h"

namespace serried::detail {
namespace {

std::vector<at::Generator> generators_of(at::Device device) {
  std::vector<at::Generator> generators{at::detail::getDefaultCPUGenerator()};
  if (const at::Generator own = rank_generator(); own != generators[0]) generators.push_back(own);
  if (!device.is_cpu()) generators.push_back(at::globalContext().defaultGenerator(device));
  return generators;
}

void drop(const at::Tensor& parameter) {
  if (parameter.defined() && parameter.is_leaf()) parameter.mutable_grad().reset();
}

}  // namespace

void BeforeStep::keep(const checkpoint::Entry& entry) {
  const auto* source = checkpoint::detail::source_of(entry.value);
  if (source != nullptr && source->module() != nullptr) {
    modules_.push_back(source->module());
  } else if (source != nullptr && source->optimizer() != nullptr) {
    optimizers_.push_back(source->optimizer());
  } else {
    others_.push_back(entry);
  }
}

std::vector<at::Tensor> BeforeStep::buffers() const {
  std::vector<at::Tensor> buffers;
  for (const torch::nn::Module* module : modules_) {
    for (const at::Tensor& buffer : module->buffers()) {
      if (buffer.defined()) buffers.push_back(buffer.detach());
    }
  }
  return buffers;
}

void BeforeStep::take() {
  const at::NoGradGuard no_grad;
  const std::vector<at::Tensor> now = buffers();
  buffer_copies_.resize(now.size());
  for (size_t i = 0; i < now.size(); ++i) buffer_copies_[i] = now[i].clone();
  options_.clear();
  for (torch::optim::Optimizer* optimizer : optimizers_) {
    auto& options = options_.emplace_back();
    for (const auto& group : optimizer->param_groups()) options.push_back(group.options().clone());
  }
  other_state_ = kept_state(others_);
  for (KeptTensor& each : other_state_.tensors) each.tensor = each.tensor.detach().clone();
  generators_.clear();
  for (at::Generator& generator : generators_of(device_)) {
    const std::lock_guard<std::mutex> lock(generator.mutex());
    generators_.emplace_back(generator, generator.get_state());
  }
}

void BeforeStep::put_back() {
  const at::NoGradGuard no_grad;
  const std::vector<at::Tensor> now = buffers();
  for (size_t i = 0; i < now.size(); ++i) now[i].copy_(buffer_copies_.at(i));
  for (size_t i = 0; i < optimizers_.size(); ++i) {
    auto& groups = optimizers_[i]->param_groups();
    for (size_t g = 0; g < options_[i].size(); ++g) groups.at(g).set_options(options_[i][g]->clone());
  }
  const Incoming places = incoming_state(others_, manifest_of(other_state_), 0);
  for (size_t i = 0; i < places.tensors.size(); ++i) places.tensors[i].detach().copy_(other_state_.tensors[i].tensor);
  for (const auto& apply : places.apply) apply();
  for (auto& [generator, state] : generators_) {
    const std::lock_guard<std::mutex> lock(generator.mutex());
    generator.set_state(state);
  }
  drop_gradients();
}

void BeforeStep::drop_gradients() {
  for (const torch::nn::Module* module : modules_) {
    for (const at::Tensor& parameter : module->parameters()) drop(parameter);
  }
  for (torch::optim::Optimizer* optimizer : optimizers_) {
    for (const auto& group : optimizer->param_groups()) {
      for (const at::Tensor& parameter : group.params()) drop(parameter);
    }
  }
}

}  // namespace serried::detail
