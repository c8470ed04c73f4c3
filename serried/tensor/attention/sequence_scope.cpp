// A thread's scope, and the dispatch key that goes with it.
#include "serried/tensor/attention/sequence_scope.h"

#include <c10/core/impl/LocalDispatchKeySet.h>

#include <utility>

#include "serried/tape/tape.h"
#include "serried/tensor/above_key.h"

namespace serried::detail {
namespace {

thread_local SequenceScopePtr current_sequence_scope;

}  // namespace

const SequenceScopePtr& sequence_scope() {
  return current_sequence_scope;
}

SequenceScopePtr exchange_sequence_scope(SequenceScopePtr scope) {
  c10::impl::tls_set_dispatch_key_included(kAboveKey, scope != nullptr);
  return std::exchange(current_sequence_scope, std::move(scope));
}

void rely_on_sequence_scope() {
  if (!tape::is_recording()) return;
  tape::rely_on({.name = "the scope of ContextParallel",
                 .value = [] { return current_sequence_scope == nullptr ? 0 : current_sequence_scope->content; }});
}

}  // namespace serried::detail
