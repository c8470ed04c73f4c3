// Wraps users' hooks: in the list of their tensor, or on their way there.
#include "serried/graph/record/user_hooks.h"

#include <ATen/core/VariableHooksInterface.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <memory>

#include "serried/graph/record/recorder.h"
#include "serried/tape/library_hook.h"

namespace serried::graph {
namespace {

using at::TensorBase;
using at::impl::VariableHooksInterface;

struct SharedHook {
  std::shared_ptr<const TensorHook> fn;

  TensorBase operator()(const TensorBase& grad) const {
    auto* recorder = dynamic_cast<Recorder*>(tape::current_recorder());
    return recorder == nullptr ? (*fn)(grad) : recorder->call_hook(fn, at::Tensor(grad));
  }
};

TensorHook shared(TensorHook hook) {
  if (!hook || is_library_hook(hook) || hook.target<SharedHook>() != nullptr) return hook;
  return SharedHook{std::make_shared<const TensorHook>(std::move(hook))};
}

// LibTorch's own, but for _register_hook.
class WatchedHooks final : public VariableHooksInterface {
 public:
  explicit WatchedHooks(const VariableHooksInterface& inner) : inner_(inner) {}

  unsigned _register_hook(const TensorBase& t, TensorHook hook) const override {
    return inner_._register_hook(t, tape::is_recording() ? shared(std::move(hook)) : std::move(hook));
  }

  TensorBase tensor_data(const TensorBase& t) const override { return inner_.tensor_data(t); }
  TensorBase variable_data(const TensorBase& t) const override { return inner_.variable_data(t); }
  const c10::intrusive_ptr<torch::autograd::Node>& grad_fn(const TensorBase& t) const override {
    return inner_.grad_fn(t);
  }
  void remove_hook(const TensorBase& t, unsigned pos) const override { inner_.remove_hook(t, pos); }
  bool is_view(const TensorBase& t) const override { return inner_.is_view(t); }
  const TensorBase& base(const TensorBase& t) const override { return inner_.base(t); }
  const std::string& name(const TensorBase& t) const override { return inner_.name(t); }
  bool is_leaf(const TensorBase& t) const override { return inner_.is_leaf(t); }
  int64_t output_nr(const TensorBase& t) const override { return inner_.output_nr(t); }
  void set_data(const TensorBase& t, const TensorBase& data) const override { inner_.set_data(t, data); }
  TensorBase data(const TensorBase& t) const override { return inner_.data(t); }
  int64_t _version(const TensorBase& t) const override { return inner_._version(t); }
  void retain_grad(const TensorBase& t) const override { inner_.retain_grad(t); }
  bool retains_grad(const TensorBase& t) const override { return inner_.retains_grad(t); }
  void _backward(const at::Tensor& t, at::TensorList inputs, const std::optional<at::Tensor>& gradient,
                 std::optional<bool> keep_graph, bool create_graph) const override {
    inner_._backward(t, inputs, gradient, keep_graph, create_graph);
  }
  void requires_grad_(const TensorBase& t, bool on) const override { inner_.requires_grad_(t, on); }
  void basic_autograd_not_implemented_fallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                                               torch::jit::Stack* stack) const override {
    inner_.basic_autograd_not_implemented_fallback(op, keys, stack);
  }
  std::optional<c10::ScalarType> grad_dtype(const TensorBase& t) const override { return inner_.grad_dtype(t); }
  void set_grad_dtype(const TensorBase& t, const std::optional<c10::ScalarType>& dtype) const override {
    inner_.set_grad_dtype(t, dtype);
  }

 private:
  const VariableHooksInterface& inner_;
};

torch::autograd::hooks_list* hooks_of(const at::Tensor& t) {
  const torch::autograd::AutogradMeta* meta = torch::autograd::impl::get_autograd_meta(t);
  return meta == nullptr ? nullptr : meta->cpp_hooks_list_.get();
}

}  // namespace

void watch_registrations() {
  static const bool once = [] {
    // Never destroyed: tensors may live in static variables.
    at::impl::SetVariableHooks(new WatchedHooks(*at::impl::GetVariableHooks()));
    return true;
  }();
  static_cast<void>(once);
}

void share_hooks(const at::Tensor& t) {
  torch::autograd::hooks_list* hooks = hooks_of(t);
  if (hooks == nullptr) return;
  for (TensorHook& hook : *hooks) hook = shared(std::move(hook));
}

int64_t num_user_hooks(const at::Tensor& t) {
  const torch::autograd::hooks_list* hooks = hooks_of(t);
  if (hooks == nullptr) return 0;
  return std::count_if(hooks->begin(), hooks->end(),
                       [](const TensorHook& hook) { return hook && !is_library_hook(hook); });
}

uint64_t hook_changes(const at::Tensor& t) {
  const torch::autograd::hooks_list* hooks = hooks_of(t);
  if (hooks == nullptr) return 0;
  // A removed hook leaves an empty function in its place.
  const auto is_removed = [](const TensorHook& hook) { return !hook; };
  return hooks->size() + uint64_t(std::count_if(hooks->begin(), hooks->end(), is_removed));
}

}  // namespace serried::graph
