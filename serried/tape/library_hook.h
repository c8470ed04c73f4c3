// Hooks on gradients that are the library's own, told apart from those of users.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function_hook.h>

#include <functional>
#include <memory>
#include <vector>

namespace serried {

/// Calls `fn` whenever a gradient flows into one of `outputs`, of which those that require none are left out. False
/// where no output is left.
bool on_gradient_of(const std::vector<at::Tensor>& outputs, const std::function<void()>& fn);

/// What `change` gives goes on in place of the gradient of `t`.
void change_gradient_of(const at::Tensor& t, std::function<at::Tensor(const at::Tensor&)> change);

/// For Node::add_post_hook: calls `fn` after the node has run.
std::unique_ptr<torch::autograd::FunctionPostHook> library_post_hook(std::function<void()> fn);

/// What Tensor::register_hook keeps in a list.
using TensorHook = std::function<at::TensorBase(const at::TensorBase&)>;

/// Whether the hook is one of these. Their ops are recorded as they run, so a replay has no hook to call.
bool is_library_hook(const TensorHook& hook);
bool is_library_hook(const torch::autograd::FunctionPostHook& hook);

/// How many hooks of users `t` has.
int64_t num_user_hooks(const at::Tensor& t);

}  // namespace serried
