// One slot per thread: who records it.
#include "serried/tape/tape.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <utility>
#include <vector>

#include "serried/base/error.h"
#include "serried/base/home_key.h"
#include "serried/tape/edges.h"
#include "serried/tape/recorder.h"

namespace serried::tape {
namespace {

// Autograd has done its part with the DTensors.
const c10::DispatchKeySet kAbovePlainOps =
    c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::DispatchKeySet(kHomeKey);

std::vector<void (*)()>& edge_functions() {
  static std::vector<void (*)()> functions;
  return functions;
}

void pass_edge() {
  for (void (*fn)() : edge_functions()) fn();
}
constinit thread_local uint64_t num_begun = 0;

}  // namespace

constinit thread_local Recorder* detail::current = nullptr;

uint64_t num_recordings() {
  return num_begun;
}

void run_unrecorded(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  c10::impl::ExcludeDispatchKeyGuard below(kAbovePlainOps);
  op.callBoxed(stack);
}

void run(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  if (C10_LIKELY(detail::current == nullptr)) return run_unrecorded(op, stack);
  detail::current->run(op, stack);
}

void rely_on(Fact fact) {
  if (detail::current != nullptr) detail::current->rely_on(std::move(fact));
}

void rely_on_life(const std::string& name, std::weak_ptr<const void> object) {
  if (detail::current != nullptr) detail::current->rely_on_life(name, std::move(object));
}

void before_replay(std::function<void()> action) {
  if (detail::current != nullptr) detail::current->before_replay(std::move(action));
}

void after_replay(std::function<void()> action) {
  if (detail::current != nullptr) detail::current->after_replay(std::move(action));
}

void replay_together(const std::string& name) {
  if (detail::current != nullptr) detail::current->replay_together(name);
}

void meet(c10::TensorImpl* dtensor) {
  if (detail::current != nullptr) detail::current->meet(dtensor);
}

Pause::Pause() : paused_(std::exchange(detail::current, nullptr)) {}

Pause::~Pause() {
  detail::current = paused_;
}

Scope::Scope(Recorder& recorder) : include_(kHomeKey) {
  if (detail::current != nullptr) {
    raise<c10::ValueError>({"tape::Scope", "this thread is being recorded already", "end the other scope first"});
  }
  pass_edge();
  detail::current = &recorder;
  ++num_begun;
}

Scope::~Scope() {
  detail::current = nullptr;
  pass_edge();
}

void at_edges(void (*fn)()) {
  edge_functions().push_back(fn);
}

OnlookerScope::OnlookerScope(Recorder& onlooker, bool sees_plain) : before_(std::exchange(detail::current, &onlooker)) {
  if (sees_plain) include_.emplace(kHomeKey);
}

OnlookerScope::~OnlookerScope() {
  detail::current = before_;
}

Aside::Aside(Recorder* behind) : onlooker_(std::exchange(detail::current, behind)) {}

Aside::~Aside() {
  detail::current = onlooker_;
}

}  // namespace serried::tape
