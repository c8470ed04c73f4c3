// One turn of the launcher's event loop.
#pragma once

#include <chrono>
#include <functional>
#include <vector>

namespace serried::launch {

using Clock = std::chrono::steady_clock;
using Time = Clock::time_point;

constexpr Time kNever = Time::max();

/// A descriptor and what to do when poll() reports one of `events` on it, or an error.
struct Watch {
  int fd;
  short events;
  std::function<void()> ready;
};

/// Waits until a watch is ready or `deadline` has come, then calls the ready ones in order.
void poll_once(const std::vector<Watch>& watches, Time deadline);

/// `seconds` from now.
Time after(std::chrono::duration<double> seconds);

}  // namespace serried::launch
