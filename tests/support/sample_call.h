// A Call from a schema text and arguments, for tests of rules.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/jit/frontend/function_schema_parser.h>
#include <torch/torch.h>

#include "serried/spmd/op_call.h"

namespace serried::testing {

/// What a Call looks at, kept alive: the schema of an op and its arguments.
struct SampleCall {
  c10::FunctionSchema schema;
  torch::jit::Stack arguments;

  /// `schema` is a schema text; arguments that are not given have their defaults.
  SampleCall(const std::string& text, torch::jit::Stack given)
      : SampleCall(torch::jit::parseSchema(text), std::move(given)) {}
  SampleCall(c10::FunctionSchema parsed, torch::jit::Stack given)
      : schema(std::move(parsed)), arguments(std::move(given)) {
    for (size_t i = arguments.size(); i < schema.arguments().size(); ++i) {
      arguments.push_back(schema.arguments()[i].default_value().value_or(c10::IValue()));
    }
  }

  spmd::Call call() const {
    std::vector<spmd::TensorArg> tensors;
    for (size_t i = 0; i < arguments.size(); ++i) {
      if (schema.arguments()[i].is_out()) continue;
      const c10::IValue& value = arguments[i];
      if (value.isTensor()) add(tensors, int(i), -1, value.toTensor());
      if (!value.isList()) continue;
      int index = 0;
      for (const c10::IValue& item : value.toListRef()) {
        if (item.isTensor()) add(tensors, int(i), index, item.toTensor());
        ++index;
      }
    }
    return spmd::Call(schema, arguments, std::move(tensors));
  }

 private:
  static void add(std::vector<spmd::TensorArg>& tensors, int argument, int list_index, const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    spmd::TensorArg arg;
    arg.argument = argument;
    arg.list_index = list_index;
    arg.sizes = c10::DimVector(tensor.sizes());
    arg.strides = c10::DimVector(tensor.strides());
    arg.dtype = tensor.scalar_type();
    tensors.push_back(std::move(arg));
  }
};

}  // namespace serried::testing
