// What the programs of these tests say, and when: a clock that processes share, lines that a kill does not lose.
#pragma once

#include <time.h>
#include <unistd.h>

#include <cstdint>
#include <string>

namespace serried::testing {

inline int64_t now_ms() {
  timespec time{};
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1000 + time.tv_nsec / 1'000'000;
}

/// One line, one write: lines of several ranks never mix, and none waits in a buffer that goes with the process.
inline void say(const std::string& text) {
  const std::string line = text + "\n";
  if (write(STDOUT_FILENO, line.data(), line.size()) < 0) _exit(9);
}

}  // namespace serried::testing
