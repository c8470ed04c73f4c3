// Marks what a function does to the state of a module, and to nothing else.
#pragma once

#include <utility>

namespace serried::tape {

/// While alive this thread brings a module's state up to date: running statistics, counters. What it reads goes into
/// what it writes only, so where a function runs a second time to make its activations again, both are left out.
class StateUpdate {
 public:
  StateUpdate() : outer_(std::exchange(active(), true)) {}
  ~StateUpdate() { active() = outer_; }
  StateUpdate(const StateUpdate&) = delete;
  StateUpdate& operator=(const StateUpdate&) = delete;
  static bool is_active() { return active(); }

 private:
  static bool& active() {
    thread_local bool value = false;
    return value;
  }
  const bool outer_;
};

}  // namespace serried::tape
