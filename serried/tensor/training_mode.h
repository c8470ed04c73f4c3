// Whether modules train or evaluate, for those who record what they do.
#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <vector>

#include "serried/base/witness.h"

namespace serried {

/// Changes with train() and eval() of any of `modules`.
Witness training_mode(std::string name, std::vector<std::shared_ptr<torch::nn::Module>> modules);

}  // namespace serried
