// Finds the hooks that users put on tensors, so that a recorder sees when autograd calls one.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace serried::graph {

/// From now on hooks that users register while their thread records pass through Recorder::call_hook. Happens once per
/// process: nothing else tells of a hook on a tensor that no later op uses.
void watch_registrations();

/// The same for the hooks that `t` has already. They stay as they are for everybody else, and share their state with
/// the graphs that call them.
void share_hooks(const at::Tensor& t);

/// How many hooks of users `t` has.
int64_t num_user_hooks(const at::Tensor& t);

/// How often hooks were registered on `t` or removed from it. Grows with each of both.
uint64_t hook_changes(const at::Tensor& t);

}  // namespace serried::graph
