// What autograd saves for backward: scopes of a thread that keep it in a way of their own.
#pragma once

#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <memory>

namespace serried::detail {

using SavedHooks = std::unique_ptr<torch::autograd::SavedVariableHooks>;

/// How the tensors that autograd saves are kept.
class TensorKeeper {
 public:
  virtual ~TensorKeeper() = default;
  /// Hooks for the next tensor that is saved, which their call_pack_hook brings. That must not be kept itself unless it
  /// is a leaf: the result of an op is saved by the node that it holds, so both would live forever. `tensor_data()` is
  /// free of this. LibTorch does not look for in-place changes of what hooks give back.
  virtual SavedHooks make_hooks() = 0;
};

/// What this thread saves goes to `keeper` while alive; null: as autograd does by itself. The innermost scope counts.
/// NotImplementedError, in the name of `where`, where another library has replaced autograd's engine.
class KeeperScope {
 public:
  KeeperScope(const char* where, TensorKeeper* keeper);
  ~KeeperScope();
  KeeperScope(const KeeperScope&) = delete;
  KeeperScope& operator=(const KeeperScope&) = delete;

 private:
  TensorKeeper* const previous_;
};

/// Of this thread's innermost scope; null where there is none.
TensorKeeper* current_keeper();

/// Makes ours the engine of every backward, unless it belongs to another library already. Happens at start-up.
void install_engine();

}  // namespace serried::detail
