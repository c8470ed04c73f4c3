// An engine that differs from autograd's own in one answer: who keeps a tensor that is being saved.
#include "serried/tensor/saved_tensors.h"

#include <torch/csrc/autograd/engine.h>

#include <utility>

#include "serried/base/error.h"

namespace serried::detail {
namespace {

using torch::autograd::Engine;

constinit thread_local TensorKeeper* innermost = nullptr;

class KeepingEngine final : public Engine {
 public:
  KeepingEngine() = default;
  ~KeepingEngine() override { stop(); }  // before the base is reached, as Engine demands
  SavedHooks get_default_saved_variable_hooks() override {
    return C10_LIKELY(innermost == nullptr) ? nullptr : innermost->make_hooks();
  }
};

Engine& own_engine() {
  static KeepingEngine engine;
  return engine;
}

void check_engine(const char* where) {
  if (C10_LIKELY(&Engine::get_default_engine() == &own_engine())) return;
  raise<c10::NotImplementedError>({where,
                                   "another library has replaced autograd's engine, so tensors that autograd saves "
                                   "cannot be kept otherwise; Python's torch does so when it is loaded",
                                   "use a process without Python's torch, or train without this"});
}

[[maybe_unused]] const bool is_installed = [] {
  install_engine();
  return true;
}();

}  // namespace

void install_engine() {
  if (&Engine::get_default_engine() == &Engine::get_base_engine()) torch::autograd::set_default_engine_stub(own_engine);
}

KeeperScope::KeeperScope(const char* where, TensorKeeper* keeper) : previous_(innermost) {
  check_engine(where);
  innermost = keeper;
}

KeeperScope::~KeeperScope() {
  innermost = previous_;
}

TensorKeeper* current_keeper() {
  return innermost;
}

}  // namespace serried::detail
