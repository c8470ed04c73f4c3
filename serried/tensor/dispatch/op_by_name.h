// Calls of ops that are given by name: which overload, and the arguments that nobody gave.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <map>
#include <string>
#include <vector>

namespace serried::detail {

/// A boxed stack of `tensors` and the defaults of all else; ValueError that names an argument without default, unless
/// it is in `given` (by name).
torch::jit::Stack fill_arguments(const c10::FunctionSchema& schema, const std::vector<at::Tensor>& tensors,
                                 const std::map<std::string, c10::IValue>& given = {});

/// The op of that name for `num_tensors` tensors; ValueError that lists the overloads.
c10::OperatorHandle find_op_for(const std::string& op, size_t num_tensors);

}  // namespace serried::detail
