// A fact about numbers that modules hand to their ops, which a graph holds as constants.
#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <string>

#include "serried/tape/tape.h"

namespace serried::tape {

/// Changes with the eps and momentum of torch's normalizations and the probabilities of its dropouts and its attention
/// in `module` and all within it. Classes of others, derived ones among them, are not looked into.
Fact options_of(const std::string& name, const std::shared_ptr<const torch::nn::Module>& module);

}  // namespace serried::tape
