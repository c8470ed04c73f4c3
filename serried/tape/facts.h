// Facts about modules and optimizers that decide which ops run.
#pragma once

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <memory>
#include <string>

#include "serried/tape/tape.h"

namespace serried::tape {

/// Changes with train() and eval() of `module` and of all within it.
Fact training_mode(std::string name, const std::shared_ptr<const torch::nn::Module>& module);

/// Changes when a parameter, a buffer or a module within `module` is registered, replaced or removed, when a member
/// of one of torch's own modules, such as Linear's `weight`, becomes another tensor, and with the number of holders of
/// a module within: one that gets another module lets go of the registered one.
Fact contents_of(const std::string& name, const std::shared_ptr<torch::nn::Module>& module);

/// Changes with the parameters of an optimizer's groups and with its options: of torch::optim's and of serried's own
/// all numbers, of others the learning rate.
Fact groups_of(const std::string& name, torch::optim::Optimizer& optimizer);

/// A number that changes with the parameters of `group`: which tensors they are, not their data.
uint64_t parameters_of(const torch::optim::OptimizerParamGroup& group);

/// Tells tensors apart, as long as both live.
inline uint64_t identity_of(const at::Tensor& t) {
  return uint64_t(reinterpret_cast<uintptr_t>(t.unsafeGetTensorImpl()));
}

/// For readers: "fingerprint 1a2b", enough to tell two states apart; "gone" for 0.
std::string fingerprint_text(uint64_t value);

}  // namespace serried::tape
