// What the dispatcher needs to know of an op, read once from its schema.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/SmallVector.h>

#include <string>

#include "serried/tensor/dispatch/handlers.h"

namespace serried::detail {

struct CachedPlan;

/// One per op and thread, so the last plan found can be kept here without a lock.
struct OpInfo {
  explicit OpInfo(const c10::OperatorHandle& op);

  enum class ArgumentKind : uint8_t { tensor, tensor_list, optional_tensor_list, value_only, other };

  std::string name;  // "aten::add.Tensor"
  const c10::FunctionSchema* schema;
  int num_arguments = 0;
  int num_returns = 0;
  c10::SmallVector<ArgumentKind, 8> kinds;
  c10::SmallVector<bool, 8> is_written;   // the op changes it in place
  c10::SmallVector<bool, 8> is_out;       // an out= argument
  c10::SmallVector<int, 4> return_alias;  // the written argument that return r is; -1: a new tensor
  bool has_written = false;
  bool has_out = false;
  bool has_lists = false;
  bool is_view = false;
  bool is_metadata_change = false;  // in place, but only of sizes and strides: squeeze_
  bool is_composite = false;        // decomposes by itself
  bool is_foreach = false;          // element i of every list is a call of its own
  bool takes_generator = false;
  Handler handler = nullptr;
  bool goes_by_rules = false;  // neither handler nor composite
  /// The plan found last, and what for.
  uint64_t last_hash = 0;
  const CachedPlan* last_plan = nullptr;
};

/// The info of `op` on this thread.
OpInfo& op_info(const c10::OperatorHandle& op);

/// Drops the plans that infos remember; they die with the cache.
void forget_last_plans();

}  // namespace serried::detail
