// An op call: its arguments by name, and the shapes and dtypes of its tensors; no ranks.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/stack.h>
#include <c10/core/ScalarType.h>

#include <optional>
#include <string_view>
#include <vector>

#include "serried/mesh/layout.h"

namespace serried::spmd {

/// One tensor among the arguments: global sizes, strides and dtype.
struct TensorArg {
  int argument = 0;     // index in the schema
  int list_index = -1;  // place in a TensorList; -1: no list
  c10::DimVector sizes;
  c10::DimVector strides;
  c10::ScalarType dtype = c10::ScalarType::Float;
  int64_t dim() const { return int64_t(sizes.size()); }
  int64_t numel() const;
};

/// Views the arguments, which must stay where they are. Rules look at nothing else; tensors that `out=` arguments name
/// are not among `tensors`, and who only reads arguments leaves `tensors` empty.
class OpCall {
 public:
  OpCall(const c10::FunctionSchema& schema, c10::ArrayRef<c10::IValue> arguments, std::vector<TensorArg> tensors = {})
      : schema_(&schema), arguments_(arguments), tensors_(std::move(tensors)) {}
  /// The call on top of `stack`.
  OpCall(const c10::OperatorHandle& op, const torch::jit::Stack& stack)
      : OpCall(op.schema(), torch::jit::last(stack, op.schema().arguments().size())) {}

  const c10::FunctionSchema& schema() const { return *schema_; }
  const std::vector<TensorArg>& tensors() const { return tensors_; }
  const TensorArg& tensor(size_t i) const { return tensors_.at(i); }
  c10::ArrayRef<c10::IValue> arguments() const { return arguments_; }
  const c10::IValue& argument(size_t i) const { return arguments_[i]; }
  /// "aten::add"
  const std::string& name() const { return schema_->name(); }
  /// Whether the op writes into tensors that out= arguments give.
  bool has_out() const;

  /// The tensor that argument `name` is; null where it is absent or a list.
  const TensorArg* tensor(std::string_view name) const;

  /// Index of the argument; -1: the schema has none of that name.
  int index(std::string_view name) const;
  bool has(std::string_view name) const { return index(name) >= 0; }  // in the schema
  /// Null where the schema has no such argument or its value is None.
  const c10::IValue* value(std::string_view name) const;

  int64_t integer(std::string_view name, int64_t otherwise = 0) const;
  double number(std::string_view name, double otherwise = 0) const;
  bool flag(std::string_view name, bool otherwise = false) const;
  /// An int list, or one int as a list; none where absent or None.
  std::optional<std::vector<int64_t>> integers(std::string_view name) const;
  std::string_view text(std::string_view name) const;
  /// The value as a T; none where absent or None.
  template <class T>
  std::optional<T> optional(std::string_view name) const {
    const c10::IValue* given = value(name);
    return given == nullptr ? std::nullopt : std::optional<T>(given->to<T>());
  }
  /// The tensor itself; undefined where absent or None.
  at::Tensor tensor_value(std::string_view name) const;
  /// `name` as dims of a tensor of `ndim` dims, counted from the front; absent, None and empty: all dims.
  std::vector<int64_t> dims(std::string_view name, int64_t ndim) const;

 private:
  const c10::FunctionSchema* schema_;
  c10::ArrayRef<c10::IValue> arguments_;
  std::vector<TensorArg> tensors_;
};

/// What rules call it.
using Call = OpCall;

/// A negative dim from the back.
inline int64_t from_front(int64_t dim, int64_t ndim) {
  return dim < 0 ? dim + (ndim > 0 ? ndim : 1) : dim;
}

}  // namespace serried::spmd
