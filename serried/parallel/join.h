// Training with inputs of different lengths: ranks that have run out keep the others' collectives complete.
//
// Before an active rank communicates, it says so: one small all-gather in which joined ranks take part, too. They
// then do their share of what was announced. So a joined rank follows whatever the others do (several forwards before
// one backward, no_sync, a second module) instead of guessing from a count of iterations.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "serried/comm/groups/group.h"

namespace serried {

struct JoinOptions {
  bool divide_by_initial_world_size = true;  // false: gradients are divided by the number of ranks that have input
  bool enable = true;                        // false: only runs the body
  bool throw_on_early_termination = false;   // every rank raises as soon as one has no more input
};

/// What the active ranks are about to do.
struct JoinNotice {
  int64_t message = 0;
  std::vector<int> active_ranks;  // in the group; ascending, never empty

  int source() const { return active_ranks.back(); }  // whose state counts
};

namespace detail {
class JoinScope;
}

/// Something that communicates while it trains. One that adds up a number over the ranks:
///     void count() { notify_join(); all_reduce_(total_, group_); }
///     void main_hook(const JoinNotice&) override { all_reduce_(at::zeros({1}), group_); }
///     void post_hook(int last_joiner) override { broadcast_(total_, group_, {.src = last_joiner}); }
class Joinable {
 public:
  Joinable() = default;
  Joinable(const Joinable&) = delete;
  Joinable& operator=(const Joinable&) = delete;
  virtual ~Joinable() = default;

  /// Does a joined rank's part of the collectives that the active ranks have announced by notify_join.
  virtual void main_hook(const JoinNotice& notice) = 0;

  /// When all ranks have joined: takes over what the last one to join has; the highest of several.
  virtual void post_hook(int last_joiner) = 0;

  virtual Group join_group() const = 0;
  virtual at::Device join_device() const = 0;

  /// Around the body; also when it throws.
  virtual void join_begins(const JoinOptions&) {}
  virtual void join_ends() {}

 protected:
  /// To be called on an active rank right before collectives that joined ranks have to take part in; every active rank
  /// gives the same `message`, 0 to 2^31 - 1. None where nobody has to be told: outside of join, or inside main_hook.
  /// Throws if a rank has joined and throw_on_early_termination is set.
  std::optional<JoinNotice> notify_join(int64_t message = 0);
  bool in_join() const { return scope_ != nullptr; }

 private:
  friend class detail::JoinScope;
  detail::JoinScope* scope_ = nullptr;
};

/// Runs `body`, which may train on any number of batches, none included; returns when all ranks have run theirs, with
/// the model of the rank that ended last. All joinables have one group. If `body` throws, nothing is done after it:
/// the other ranks' next collective fails by the group's timeout.
///     join({&ddp}, [&] { for (auto& batch : mine) step(batch); }, {.divide_by_initial_world_size = false});
void join(std::vector<Joinable*> joinables, const std::function<void()>& body, JoinOptions options = {});

}  // namespace serried
