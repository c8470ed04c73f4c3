// Wraps users' hooks, in the list of their tensor or on their way there, and calls them as autograd would have.
#include "serried/graph/record/hooks.h"

#include <ATen/core/VariableHooksInterface.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/clone.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>

#include <algorithm>
#include <utility>

#include "serried/base/error.h"
#include "serried/graph/error.h"
#include "serried/graph/graph.h"
#include "serried/graph/record/recorder.h"
#include "serried/tensor/meta.h"

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
    auto* recorder = dynamic_cast<Recorder*>(tape::current_recorder());
    if (recorder == nullptr) return inner_._register_hook(t, std::move(hook));
    if (!is_library_hook(hook)) recorder->note_hooks_before(at::Tensor(t));
    return inner_._register_hook(t, shared(std::move(hook)));
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

thread_local const GraphHooks* hooks_of_thread = nullptr;

const GraphHook& hook_at(int64_t id) {
  const int64_t num_hooks = hooks_of_thread == nullptr ? 0 : int64_t(hooks_of_thread->size());
  if (id >= 0 && id < num_hooks) return (*hooks_of_thread)[size_t(id)];
  raise<c10::ValueError>({"call_hook", c10::str("hook ", id, " is not there: this graph has ", num_hooks),
                          "replay the captured function; a graph read from a file comes without hooks"});
}

// Graphs run below autograd; hooks are users' code and know nothing of that.
class AsOutside {
 public:
  AsOutside() : AsOutside(c10::impl::tls_local_dispatch_key_set()) {}

 private:
  explicit AsOutside(c10::impl::LocalDispatchKeySet keys)
      : keys_(keys.included_,
              keys.excluded_ - c10::autograd_dispatch_keyset_with_ADInplaceOrView - c10::DispatchKeySet(kHomeKey)) {}
  const tape::Pause pause_;
  const c10::impl::ForceDispatchKeyGuard keys_;
};

void check_result(const at::Tensor& result, const at::Tensor& given) {
  const DTensorMeta *before = dtensor_meta(given), *after = dtensor_meta(result);
  const bool same_kind = (before == nullptr) == (after == nullptr);
  if (same_kind && result.sizes() == given.sizes() && result.scalar_type() == given.scalar_type() &&
      (before == nullptr || after->spec == before->spec)) {
    return;
  }
  const auto text = [](const at::Tensor& t, const DTensorMeta* dtensor) {
    const std::string part = meta_of(t).to_string();
    return dtensor == nullptr ? part : c10::str(part, " ", dtensor->spec->to_string());
  };
  raise<c10::ValueError>(
      {"call_hook",
       c10::str("a hook was given the gradient ", text(given, before), " and returned ", text(result, after)),
       "return a gradient of the same shape, dtype and placements"});
}

at::Tensor call_hook(const at::Tensor& grad, int64_t id) {
  const GraphHook hook = hook_at(id);
  const AsOutside outside;
  // Autograd calls hooks in its own grad mode; a replay is outside of it.
  const at::AutoGradMode mode(at::GradMode::is_enabled() && torch::autograd::get_current_graph_task_id() != -1);
  const at::Tensor given = hook.spec && grad.defined() ? wrap(grad, hook.spec) : grad;
  at::Tensor result((*hook.fn)(given));
  if (!grad.defined()) return result;
  if (result.defined()) {
    check_result(result, given);
    if (hook.spec) result = dtensor_meta(result)->local;
  }
  // A result of its own each time: whether it shares memory with the operand must not depend on what the hook does.
  return result.defined() && !result.is_alias_of(grad) ? result : grad.clone();
}

TORCH_LIBRARY_FRAGMENT(serried, m) {
  m.def("call_hook(Tensor grad, int id) -> Tensor", call_hook);
}

// Made while the library is loaded: other threads come to it through a pointer of LibTorch's that orders nothing. Never
// destroyed: tensors may live in static variables.
VariableHooksInterface* const watched_hooks = new WatchedHooks(*at::impl::GetVariableHooks());

}  // namespace

void watch_registrations() {
  static const bool once = [] {
    at::impl::SetVariableHooks(watched_hooks);
    return true;
  }();
  static_cast<void>(once);
}

void share_hooks(const at::Tensor& t) {
  torch::autograd::hooks_list* hooks = hooks_of(t);
  if (hooks == nullptr) return;
  for (TensorHook& hook : *hooks) hook = shared(std::move(hook));
}

uint64_t hook_changes(const at::Tensor& t) {
  const torch::autograd::hooks_list* hooks = hooks_of(t);
  if (hooks == nullptr) return 0;
  // A removed hook leaves an empty function in its place.
  const auto is_removed = [](const TensorHook& hook) { return !hook; };
  return hooks->size() + uint64_t(std::count_if(hooks->begin(), hooks->end(), is_removed));
}

void refuse_hooks_left(const Recording& recording) {
  if (recording.hook_left_on.empty()) return;
  throw CaptureError({CaptureErrorKind::unsupported,
                      "",
                      "",
                      "the function puts a hook on the tensor " + recording.hook_left_on +
                          " of its surroundings and leaves it there: one more at each call, but none at a replay",
                      {"register the hook once, before the captured function is called",
                       "take it away again before the function returns, with remove_hook"}});
}

HooksScope::HooksScope(const GraphHooks& hooks) : previous_(std::exchange(hooks_of_thread, &hooks)) {}

HooksScope::~HooksScope() {
  hooks_of_thread = previous_;
}

}  // namespace serried::graph
