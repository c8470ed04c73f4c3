// What a composite op runs instead of itself.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <string>
#include <vector>

#include "serried/spmd/op_call.h"

namespace serried::detail {

/// The ops that `call` of a composite runs, each once, in the order of their first calls: found by running it on
/// tensors without data, and so without what it would choose by their device. An op that needs data, or has no form
/// without, is the last one.
struct CompositeParts {
  std::vector<std::string> names = {};
  bool is_complete = false;

  /// "aten::t, aten::mm"
  std::string to_string() const;
};

CompositeParts parts_of(const c10::OperatorHandle& op, const spmd::OpCall& call);

}  // namespace serried::detail
