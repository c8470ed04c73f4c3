// What the backend asks of tensors before it takes their bytes.
#pragma once

#include "serried/comm/backends/shm/driver.h"

#include <ATen/core/Tensor.h>

#include <string_view>
#include <vector>

namespace serried::shm {

/// The bytes of `tensor` in order: itself where it is dense and contiguous, else a copy. ValueError for what is not a
/// dense CPU tensor.
at::Tensor readable(std::string_view where, const at::Tensor& tensor);

/// As `readable`, for results: where a copy was made, `task.after` brings it back. The tensor is kept alive.
at::Tensor writable(std::string_view where, const at::Tensor& tensor, Task& task);

/// The one tensor of a c10d list; ValueError for any other number.
const at::Tensor& only(std::string_view where, const std::vector<at::Tensor>& tensors);

/// ValueError unless all have the dtype of `like`.
void check_dtype(std::string_view where, const at::Tensor& tensor, const at::Tensor& like);

/// ValueError unless `count` is `expected`; `what` says of what.
void check_count(std::string_view where, std::string_view what, int64_t count, int64_t expected);

}  // namespace serried::shm
