// What a handler sees of a call: arguments by name, DTensors, and how to leave results.
#pragma once

#include <initializer_list>
#include <vector>

#include "serried/spmd/call.h"
#include "serried/tensor/dispatch/handlers.h"
#include "serried/tensor/meta.h"

namespace serried::detail {

class HandlerCall {
 public:
  HandlerCall(const c10::OperatorHandle& op, torch::jit::Stack& stack)
      : schema_(op.schema()),
        stack_(stack),
        first_(stack.size() - schema_.arguments().size()),
        call_(schema_, c10::ArrayRef<c10::IValue>(stack).slice(first_), {}) {}

  /// Arguments by name.
  const spmd::Call& call() const { return call_; }
  const c10::IValue& argument(size_t i) const { return stack_[first_ + i]; }
  const at::Tensor& tensor(size_t i) const { return argument(i).toTensor(); }
  std::string where() const { return schema_.name(); }

  /// Whether the op writes into tensors that out= arguments give.
  bool has_out() const {
    for (const c10::Argument& argument : schema_.arguments()) {
      if (argument.is_out()) return true;
    }
    return false;
  }

  /// Puts the results in place of the arguments. Always true: done.
  bool finish(std::initializer_list<c10::IValue> results) {
    const std::vector<c10::IValue> kept(results);
    stack_.resize(first_);
    stack_.insert(stack_.end(), kept.begin(), kept.end());
    return true;
  }

 private:
  const c10::FunctionSchema& schema_;
  torch::jit::Stack& stack_;
  size_t first_;
  spmd::Call call_;
};

/// This rank's part of `t` placed as `to`; all ranks of the mesh call it.
at::Tensor local_as(const DTensorMeta& meta, const Placements& to);
/// All of it.
at::Tensor whole_local(const DTensorMeta& meta);

}  // namespace serried::detail
