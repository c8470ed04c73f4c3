// Tells trackers of modules which ops run: LibTorch calls it for each, with its arguments, while a mode asks for it.
#include <ATen/record_function.h>

#include "serried/tensor/debug/comm_debug_state.h"
#include "serried/tensor/debug/comm_notes.h"

namespace serried {
namespace {

constinit thread_local int num_followers = 0;
constinit thread_local at::CallbackHandle callback = at::INVALID_CALLBACK_HANDLE;

using ModeState = CommDebugMode::State;

// Who was told that an op begins, and has to be told that it ends.
struct Told final : at::ObserverContext {
  std::vector<ModeState*> modes;
};

bool is_alive(const ModeState* mode) {
  for (const ModeState* each = detail::newest_mode(); each != nullptr; each = each->outer) {
    if (each == mode) return true;
  }
  return false;
}

std::unique_ptr<at::ObserverContext> begin_op(const at::RecordFunction& call) {
  std::unique_ptr<Told> told;
  for (ModeState* mode = detail::newest_mode(); mode != nullptr; mode = mode->outer) {
    if (!mode->tracker || !mode->tracker->begin(call.inputs())) continue;
    if (!told) told = std::make_unique<Told>();
    told->modes.push_back(mode);
  }
  return told;
}

void end_op(const at::RecordFunction&, at::ObserverContext* context) {
  if (context == nullptr) return;
  for (ModeState* mode : static_cast<Told*>(context)->modes) {
    if (is_alive(mode)) mode->tracker->end();
  }
}

}  // namespace

void detail::follow_ops() {
  if (num_followers++ > 0) return;
  callback = at::addThreadLocalCallback(
      at::RecordFunctionCallback(begin_op, end_op).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
}

void detail::follow_no_ops() {
  if (--num_followers > 0) return;
  at::removeCallback(callback);
}

bool comm_debug::follows_modules() {
  return num_followers > 0;
}

void comm_debug::OnBehalf::begin(const std::vector<const c10::TensorImpl*>& parameters) {
  for (ModeState* mode = detail::newest_mode(); mode != nullptr; mode = mode->outer) {
    if (mode->tracker) mode->tracker->begin_for(parameters);
  }
}

void comm_debug::OnBehalf::end() {
  for (ModeState* mode = detail::newest_mode(); mode != nullptr; mode = mode->outer) {
    if (mode->tracker) mode->tracker->end();
  }
}

}  // namespace serried
