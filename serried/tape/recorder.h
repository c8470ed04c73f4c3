// The other side of tape.h: who records implements this. Layers that are recorded need not know it.
#pragma once

#include <c10/core/impl/LocalDispatchKeySet.h>

#include <optional>

#include "serried/tape/tape.h"

namespace serried::tape {

/// Who has to know of ops no more than what they read and make.
class Notes {
 public:
  /// `plain` is read, whose writes `counter` counts: those to the part of a DTensor are counted by that.
  virtual void read(const c10::TensorImpl& plain, const c10::VariableVersion& counter) = 0;
  virtual void made(const at::Tensor& plain) = 0;

 protected:
  ~Notes() = default;
};

/// Sees every op on plain tensors that its thread runs, those inside DTensors and backward included, below autograd.
/// Each function is told what the one of the same name in tape.h was.
class Recorder {
 public:
  virtual ~Recorder() = default;
  /// Has to run the op, by `run_unrecorded`.
  virtual void run(const c10::OperatorHandle& op, torch::jit::Stack& stack) = 0;
  virtual void rely_on(Fact fact) = 0;
  virtual void rely_on_life(const std::string& name, std::weak_ptr<const void> object) = 0;
  virtual void before_replay(std::function<void()> action) = 0;
  virtual void after_replay(std::function<void()> action) = 0;
  virtual void meet(c10::TensorImpl* dtensor) = 0;
  virtual void replay_together(const std::string& group) {
    if (Recorder* next = behind()) next->replay_together(group);
  }
  /// An op reads the whole value of `dtensor`, which was gathered out of its sight.
  virtual void read_whole(c10::TensorImpl* dtensor) {
    if (Recorder* next = behind()) next->read_whole(dtensor);
  }
  /// To whom it hands on all of this, where it only looks on; null for one that records.
  virtual Recorder* behind() const { return nullptr; }
  /// Whom to tell of an op that neither writes nor draws, instead of running it here; of views there is nothing to
  /// tell. Null: it has to see all ops.
  virtual Notes* notes() { return nullptr; }
  /// Whether what it sees may stand for the code that did it, later.
  virtual bool replays() const { return true; }
};

/// This thread is recorded by `recorder` while alive. One at a time.
class Scope {
 public:
  explicit Scope(Recorder& recorder);
  ~Scope();
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;

 private:
  c10::impl::IncludeDispatchKeyGuard include_;  // leads every op to the fallback of the home key, which calls run()
};

/// `onlooker` sees what this thread does while alive, before who did so until now, its `behind()`. Nests. Without
/// `sees_plain` ops that are called on plain tensors pass it by, unless there is somebody behind it.
class OnlookerScope {
 public:
  explicit OnlookerScope(Recorder& onlooker, bool sees_plain = true);
  ~OnlookerScope();
  OnlookerScope(const OnlookerScope&) = delete;
  OnlookerScope& operator=(const OnlookerScope&) = delete;

 private:
  std::optional<c10::impl::IncludeDispatchKeyGuard> include_;
  Recorder* const before_;
};

/// While alive an onlooker does something that only those behind it see.
class Aside {
 public:
  explicit Aside(Recorder* behind);
  ~Aside();
  Aside(const Aside&) = delete;
  Aside& operator=(const Aside&) = delete;

 private:
  Recorder* const onlooker_;
};

/// The last in the row: who records this thread, or else its first onlooker; null nearly always.
inline Recorder* current_recorder() {
  Recorder* last = detail::current;
  while (last != nullptr && last->behind() != nullptr) last = last->behind();
  return last;
}

/// Whether what this thread does is replayed later: not so where nobody but onlookers see it.
inline bool is_replayed() {
  return detail::current != nullptr && detail::current->replays();
}

/// What `run` does where nobody records.
void run_unrecorded(const c10::OperatorHandle& op, torch::jit::Stack& stack);

}  // namespace serried::tape
