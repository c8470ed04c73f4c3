// How far the clock of this host is from node 0's, by questions that launchers answer at once.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace serried::launch {

/// What has to be added to this host's CLOCK_MONOTONIC to get node 0's, in ns, and by how much that may be wrong.
struct ClockEstimate {
  int64_t offset_ns = 0;
  int64_t error_ns = 0;

  bool operator==(const ClockEstimate&) const = default;
};

/// Keeps the best of all answers: the one that was back soonest, unless it is so old that the clocks may have drifted.
class ClockOffset {
 public:
  /// Asked and heard by this clock, answered by the other. Times that make no sense count for nothing.
  void add(int64_t asked_ns, int64_t answered_ns, int64_t heard_ns);

  /// Nothing before the first answer.
  std::optional<ClockEstimate> at(int64_t now_ns) const;

 private:
  struct Sample {
    ClockEstimate estimate;
    int64_t heard_ns = 0;

    int64_t error_at(int64_t now_ns) const;
  };
  std::optional<Sample> best_;
};

/// A time in a message; std::runtime_error if it is none.
int64_t nanoseconds_in(const std::string& field);

}  // namespace serried::launch
