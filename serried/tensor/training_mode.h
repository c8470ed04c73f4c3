// Whether a module trains or evaluates, for those who record what it does.
#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <string>

#include "serried/base/witness.h"

namespace serried {

/// Changes with train() and eval() of `module` and of all within it.
Witness training_mode(std::string name, const std::shared_ptr<torch::nn::Module>& module);

}  // namespace serried
