// poll() with callbacks: few descriptors, so no epoll.
#include "serried/launch/loop.h"

#include <poll.h>

#include <algorithm>

namespace serried::launch {

void poll_once(const std::vector<Watch>& watches, Time deadline) {
  std::vector<pollfd> fds;
  for (const Watch& watch : watches) fds.push_back({.fd = watch.fd, .events = watch.events, .revents = 0});
  int timeout_ms = -1;
  if (deadline != kNever) {
    // Rounded up: a turn that ends just before its deadline would spin.
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
    timeout_ms = static_cast<int>(std::clamp<int64_t>(left.count(), 0, 3'600'000));
  }
  if (::poll(fds.data(), fds.size(), timeout_ms) <= 0) return;
  for (size_t i = 0; i < fds.size(); ++i) {
    if (fds[i].revents != 0) watches[i].ready();
  }
}

Time after(std::chrono::duration<double> seconds) {
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(seconds);
}

}  // namespace serried::launch
