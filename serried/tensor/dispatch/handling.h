// What handlers need of a call: its arguments by name, local parts, and how to leave results.
#pragma once

#include <initializer_list>

#include "serried/spmd/op_call.h"
#include "serried/tensor/dispatch/handlers.h"
#include "serried/tensor/meta.h"

namespace serried::detail {

using spmd::OpCall;

/// Puts the results in place of the arguments of `op`. Always true: done.
bool finish(const c10::OperatorHandle& op, torch::jit::Stack& stack, std::initializer_list<c10::IValue> results);

/// This rank's part of `t` placed as `to`; all ranks of the mesh call it.
at::Tensor local_as(const DTensorMeta& meta, const Placements& to);
/// All of it.
at::Tensor whole_local(const DTensorMeta& meta);

}  // namespace serried::detail
