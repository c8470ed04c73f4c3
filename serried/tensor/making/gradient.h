// Gradients of what moves data between local and distributed tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>

namespace serried::detail {

/// Whether autograd records what is done to `input`.
bool wants_gradient(const at::Tensor& input);

/// The gradient of the input from that of the output, in differentiable steps: it is then itself twice differentiable.
using Backward = std::function<at::Tensor(const at::Tensor& grad)>;

/// Makes `output`, a fresh tensor, a function of `input`. `name` must live for ever. Backward runs what comes later
/// first: `order` is the place among the thread's ops where it is not now, from place_in_order.
void record_gradient(const char* name, const at::Tensor& input, const at::Tensor& output, Backward backward,
                     std::optional<uint64_t> order = {});
uint64_t place_in_order();

/// A fresh tensor on the memory of `local`, a view of `whole` to autograd: it shares its version, and writing to it
/// while autograd records raises.
at::Tensor alias_of_local(const at::Tensor& local, const at::Tensor& whole);

}  // namespace serried::detail
