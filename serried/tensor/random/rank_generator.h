// This rank's generator for ops that draw by themselves.
#pragma once

#include <ATen/core/function_schema.h>
#include <ATen/core/stack.h>

#include "serried/mesh/mesh.h"

namespace serried::detail {

/// Puts this rank's generator where the call on top of `stack` has a generator argument that is None. With a mesh the
/// ranks' generators are compared as generator_for does.
void put_rank_generator(const c10::FunctionSchema& schema, torch::jit::Stack& stack, const DeviceMesh* mesh = nullptr);

}  // namespace serried::detail
