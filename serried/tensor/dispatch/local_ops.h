// Who runs the ops of this thread on plain tensors: the dispatcher alone, or a tap that sees each as it runs.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <functional>

#include "serried/base/witness.h"

namespace serried {

/// Runs `op` on plain tensors, below autograd and below the home key. Every local op of a DTensor goes through here.
void execute_local(const c10::OperatorHandle& op, torch::jit::Stack& stack);

/// Sees every op on plain tensors that its thread runs, those inside DTensors and backward included, below autograd.
class LocalOpTap : public WitnessListener {
 public:
  /// Has to run the op, by `run_untapped`.
  virtual void run(const c10::OperatorHandle& op, torch::jit::Stack& stack) = 0;
  /// A DTensor among the arguments of an op, before the op runs on its part.
  virtual void meet(c10::TensorImpl* dtensor) = 0;
  /// Host work that belongs to the tapped function and that no op shows: done again around each replay.
  virtual void before_replay(std::function<void()> action) = 0;
  virtual void after_replay(std::function<void()> action) = 0;
};

/// Gives this thread's ops to `tap` while alive. One at a time.
class TapGuard {
 public:
  explicit TapGuard(LocalOpTap& tap);
  ~TapGuard();
  TapGuard(const TapGuard&) = delete;
  TapGuard& operator=(const TapGuard&) = delete;

 private:
  c10::impl::IncludeDispatchKeyGuard include_;
};

/// While alive this thread's ops pass its tap by: what they compute is no part of what is tapped.
class PauseTap {
 public:
  PauseTap();
  ~PauseTap();
  PauseTap(const PauseTap&) = delete;
  PauseTap& operator=(const PauseTap&) = delete;

 private:
  LocalOpTap* paused_;
};

namespace detail {
extern constinit thread_local LocalOpTap* current_tap;  // constinit: read without a check for its initialisation
}

/// Null nearly always: a test of one word.
inline LocalOpTap* local_op_tap() {
  return detail::current_tap;
}

/// What `execute_local` does where there is no tap.
void run_untapped(const c10::OperatorHandle& op, torch::jit::Stack& stack);

}  // namespace serried
