// The one place where an op runs on plain tensors.
#include "serried/tensor/dispatch/local_ops.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <utility>

#include "serried/base/error.h"
#include "serried/tensor/dispatch/local_only.h"
#include "serried/tensor/meta.h"

namespace serried {
namespace {

// Local calls happen below autograd (it has done its part with the DTensors) and below the home key.
const c10::DispatchKeySet kExcludedFromLocal =
    c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::DispatchKeySet(kHomeKey);

thread_local bool local_only = false;

}  // namespace

detail::LocalOnly::LocalOnly() : was_local_only_(std::exchange(local_only, true)) {
  // The home key leads to the tap as well.
  if (current_tap == nullptr) below_home_.emplace(kHomeKey);
}

detail::LocalOnly::~LocalOnly() {
  local_only = was_local_only_;
}

bool detail::is_local_only() {
  return local_only;
}

constinit thread_local LocalOpTap* detail::current_tap = nullptr;

namespace {

LocalOpTap* exchange_tap(LocalOpTap* tap) {
  detail::current_listener = tap;
  return std::exchange(detail::current_tap, tap);
}

}  // namespace

TapGuard::TapGuard(LocalOpTap& tap) : include_(kHomeKey) {
  if (detail::current_tap != nullptr) {
    raise<c10::ValueError>({"TapGuard", "the ops of this thread are tapped already", "end the other scope first"});
  }
  exchange_tap(&tap);
}

TapGuard::~TapGuard() {
  exchange_tap(nullptr);
}

PauseTap::PauseTap() : paused_(exchange_tap(nullptr)) {}

PauseTap::~PauseTap() {
  exchange_tap(paused_);
}

void run_untapped(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  c10::impl::ExcludeDispatchKeyGuard below(kExcludedFromLocal);
  op.callBoxed(stack);
}

void execute_local(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  if (C10_LIKELY(detail::current_tap == nullptr)) return run_untapped(op, stack);
  detail::current_tap->run(op, stack);
}

}  // namespace serried
