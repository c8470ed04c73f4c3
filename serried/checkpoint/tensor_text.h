// Tensors as text to be read, and as JSON to be read by programs.
#pragma once

#include <ATen/core/Tensor.h>

#include <nlohmann/json.hpp>

#include <string>

namespace serried::checkpoint::detail {

/// Nested brackets, one row per line, with all digits that tell a value from its neighbours. Unless `all`, of a tensor
/// with more than 1000 elements the first and the last three along each dim, and "..." between.
///     [[1, 2.5],
///      [3, 4]]
std::string tensor_text(const at::Tensor& tensor, bool all);

/// Nested lists of all elements. Complex numbers are lists of two; a number that is not finite is as in index.json.
nlohmann::json tensor_json(const at::Tensor& tensor);

}  // namespace serried::checkpoint::detail
