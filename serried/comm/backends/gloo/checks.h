// What gloo cannot do, found before it is asked: on its own thread the same refusal would end the group.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <string_view>
#include <vector>

namespace serried::gloo {

/// ValueError unless the values of each tensor lie in memory one after the other: gloo takes the bytes as they are.
void check_memory(std::string_view where, const std::vector<at::Tensor>& tensors);

/// ValueError unless gloo moves these dtypes; of complex numbers it moves only what `takes_complex`.
void check_carried(std::string_view where, const std::vector<at::Tensor>& tensors, bool takes_complex = false);

/// ValueError unless gloo has `op` for these dtypes.
void check_reduction(std::string_view where, const std::vector<at::Tensor>& tensors, const c10d::ReduceOp& op);

}  // namespace serried::gloo
