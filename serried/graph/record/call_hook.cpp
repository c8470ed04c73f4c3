// Calls a user's hook in the middle of a graph as autograd would have called it.
#include "serried/graph/record/call_hook.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/clone.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/library.h>

#include <utility>

#include "serried/base/error.h"
#include "serried/graph/graph.h"
#include "serried/tape/recorder.h"
#include "serried/tensor/meta.h"

namespace serried::graph {
namespace {

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

}  // namespace

HooksGuard::HooksGuard(const GraphHooks& hooks) : previous_(std::exchange(hooks_of_thread, &hooks)) {}

HooksGuard::~HooksGuard() {
  hooks_of_thread = previous_;
}

}  // namespace serried::graph
