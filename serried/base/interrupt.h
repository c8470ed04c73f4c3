// How a thread that waits for other ranks can be told to give up: Ctrl-C in an interpreter is no more than a flag until
// somebody looks.
#pragma once

#include <atomic>
#include <string>

namespace serried::interrupt {

namespace detail {
extern std::atomic<void (*)()> installed;
}

/// Has every thread that waits for a collective call `check` at least every 50 ms, without a lock of ours. What it
/// throws ends the wait and the group, for all ranks. Null, which it is at first: nobody looks.
///     interrupt::set_check([] { if (pressed) throw Interrupted(); });
void set_check(void (*check)());

inline bool is_possible() {
  return detail::installed.load(std::memory_order_relaxed) != nullptr;
}

/// Raises what the installed check raises.
void check();

/// What the other ranks are told.
std::string reason(int rank);

}  // namespace serried::interrupt
