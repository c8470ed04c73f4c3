// The one boxed fallback at the home key, and how calls on DTensors run: handler, or plan by rules.
#include "serried/tensor/dispatch/dispatch.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include "serried/base/error.h"
#include "serried/tape/tape.h"
#include "serried/tensor/dispatch/cached_plan.h"
#include "serried/tensor/dispatch/arguments.h"
#include "serried/tensor/dispatch/local_only.h"
#include "serried/tensor/dispatch/handlers.h"

namespace serried {
namespace {

using c10::DispatchKey;
using torch::jit::Stack;

// No tensor of ours among the arguments: the key came from a scope that includes it.
void run_plain(const c10::OperatorHandle& op, const detail::OpInfo& info, Stack& stack) {
  if (!detail::is_local_only() && detail::make_born_sharded(op, stack)) return;
  // A recorder sees what composites are made of.
  if (info.is_composite && tape::is_recording()) {
    return op.callBoxedForDispatchKey(DispatchKey::CompositeImplicitAutograd, stack);
  }
  tape::run(op, stack);
}

void run_by_rules(const c10::OperatorHandle& op, detail::OpInfo& info, const detail::Arguments& arguments,
                  Stack& stack) {
  std::unique_ptr<detail::CachedPlan> uncached;
  const detail::CachedPlan& plan = detail::plan_for(info, arguments, stack, uncached);
  if (plan.is_fast) return detail::run_fast(op, info, plan, arguments, stack);
  c10::impl::ExcludeDispatchKeyGuard below(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
  detail::run_planned(op, info, plan, arguments, stack);
}

void introduce(const detail::Arguments& arguments) {
  for (const detail::TensorSlot& slot : arguments.tensors) {
    if (slot.meta != nullptr) tape::meet(slot.impl);
  }
}

void run_dtensors(const c10::OperatorHandle& op, detail::OpInfo& info, Stack& stack) {
  detail::Arguments arguments;
  detail::collect(info, stack, arguments);
  detail::run_collected(op, info, arguments, stack);
}

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  detail::OpInfo& info = detail::op_info(op);
  const TensorKind* kind = detail::kind_of_call(info, *stack);
  kind != nullptr ? kind->run(op, info, *stack) : run_plain(op, info, *stack);
}

// Two owners of one key would silently take each other's tensors.
bool home_key_is_free() {
  return !c10::Dispatcher::singleton().hasBackendFallbackForDispatchKey(kHomeKey);
}

}  // namespace

constinit const TensorKind kDTensor{
    .name = "DTensor",
    .to_plain = "to_local() or full_tensor()",
    .no_memory =
        "[data_ptr] a DTensor has no memory of its own\n"
        "  fix: use to_local() for this rank's part, or full_tensor() for the whole, also for torch::save; to "
        "print it: std::cout << serried::DTensor(x)",
    .run = run_dtensors,
};

void detail::run_collected(const c10::OperatorHandle& op, OpInfo& info, const Arguments& arguments, Stack& stack) {
  if (C10_UNLIKELY(tape::is_recording())) introduce(arguments);
  if (C10_LIKELY(info.goes_by_rules && arguments.first != nullptr)) return run_by_rules(op, info, arguments, stack);
  c10::impl::ExcludeDispatchKeyGuard below(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
  if (info.handler != nullptr && info.handler(op, stack)) return;
  if (arguments.first == nullptr) {
    raise<c10::TypeError>({info.name, "the out= tensor is a DTensor but no input is",
                           "call the op without out= and distribute the result"});
  }
  // Composites arrive whole only where autograd is off: they decompose here as they would there.
  if (info.is_composite) return op.callBoxedForDispatchKey(DispatchKey::CompositeImplicitAutograd, stack);
  run_by_rules(op, info, arguments, stack);
}

void detail::run_boxed(const c10::OperatorHandle& op, Stack& stack) {
  fallback(op, {}, &stack);
}

TORCH_LIBRARY_IMPL(_, Fake, m) {
  if (!home_key_is_free()) {
    raise<c10::Error>({"serried", "another library has registered a fallback for the dispatch key Fake",
                       "load only one library that uses this key in a process"});
  }
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

}  // namespace serried
