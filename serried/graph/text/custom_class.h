// Objects of c10d among the arguments and results of ops.
#pragma once

#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

namespace serried::graph {

/// Whether `type` is that of the class "ProcessGroup", "ReduceOp" or "Work" of c10d.
inline bool is_c10d_type(const c10::Type& type, const char* name) {
  const auto* object = type.castRaw<c10::ClassType>();
  return object != nullptr && object->name()->prefix() == "__torch__.torch.classes.c10d" &&
         object->name()->name() == name;
}

inline bool is_group(const c10::IValue& value) {
  return value.isCustomClass() && is_c10d_type(*value.type(), "ProcessGroup");
}

inline bool is_work(const c10::IValue& value) {
  return value.isCustomClass() && is_c10d_type(*value.type(), "Work");
}

/// Null where `value` is anything else.
inline const c10d::ReduceOp* reduce_op_of(const c10::IValue& value) {
  const bool is_it = value.isCustomClass() && is_c10d_type(*value.type(), "ReduceOp");
  return is_it ? value.toCustomClass<c10d::ReduceOp>().get() : nullptr;
}

}  // namespace serried::graph
