// Hooks of the library have types of their own, by which is_library_hook knows them.
#include "serried/tape/library_hook.h"

#include <ATen/core/VariableHooksInterface.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

namespace serried {
namespace {

struct LibraryHook {
  std::function<at::Tensor(const at::Tensor&)> change;
  at::TensorBase operator()(const at::TensorBase& grad) const { return change(at::Tensor(grad)); }
};

struct LibraryPostHook final : torch::autograd::FunctionPostHook {
  explicit LibraryPostHook(std::function<void()> call_) : call(std::move(call_)) {}
  std::vector<at::Tensor> operator()(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>&) override {
    call();
    return outputs;
  }
  std::function<void()> call;
};

}  // namespace

bool on_gradient_of(const std::vector<at::Tensor>& outputs, const std::function<void()>& fn) {
  bool any = false;
  for (const at::Tensor& output : outputs) {
    if (!output.requires_grad()) continue;
    any = true;
    // An undefined result leaves the gradient as it is.
    change_gradient_of(output, [fn](const at::Tensor&) {
      fn();
      return at::Tensor();
    });
  }
  return any;
}

void change_gradient_of(const at::Tensor& t, std::function<at::Tensor(const at::Tensor&)> change) {
  at::impl::GetVariableHooks()->_register_hook(t, LibraryHook{std::move(change)});
}

std::unique_ptr<torch::autograd::FunctionPostHook> library_post_hook(std::function<void()> fn) {
  return std::make_unique<LibraryPostHook>(std::move(fn));
}

bool is_library_hook(const TensorHook& hook) {
  return hook.target<LibraryHook>() != nullptr;
}

bool is_library_hook(const torch::autograd::FunctionPostHook& hook) {
  return dynamic_cast<const LibraryPostHook*>(&hook) != nullptr;
}

int64_t num_user_hooks(const at::Tensor& t) {
  const torch::autograd::AutogradMeta* meta = torch::autograd::impl::get_autograd_meta(t);
  if (meta == nullptr || meta->cpp_hooks_list_ == nullptr) return 0;
  return std::count_if(meta->cpp_hooks_list_->begin(), meta->cpp_hooks_list_->end(),
                       [](const TensorHook& hook) { return hook && !is_library_hook(hook); });
}

}  // namespace serried
