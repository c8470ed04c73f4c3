// What modules and optimizers consist of, for those who record what they do.
#pragma once

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <memory>
#include <string>

#include "serried/base/witness.h"

namespace serried::graph {

/// Changes when a parameter, a buffer or a module within `module` is registered, replaced or removed, and when a member
/// of one of torch's own modules, such as Linear's `weight`, becomes another tensor.
Witness contents_of(std::string name, const std::shared_ptr<torch::nn::Module>& module);

/// Changes with the parameters of an optimizer's groups and with its options: of torch::optim's and of serried's own
/// all numbers, of others the learning rate.
Witness groups_of(std::string name, torch::optim::Optimizer& optimizer);

}  // namespace serried::graph
