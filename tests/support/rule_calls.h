// Calls of ATen ops by name, and what the rules say of them.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <string>

#include "serried/mesh/layout.h"

namespace serried::testing {

/// "add.Tensor"
c10::OperatorHandle aten_op(const std::string& name);

/// Random doubles.
at::Tensor numbers(const Sizes& sizes);

/// The text of the rule that the call finds; "none" without one.
std::string rule_of(const std::string& op, const torch::jit::Stack& arguments);

/// Tries the rows of the call's rule, by brute force.
void expect_right(const std::string& op, const torch::jit::Stack& arguments);

}  // namespace serried::testing
