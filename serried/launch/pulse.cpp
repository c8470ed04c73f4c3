// Arithmetic on moments, without a clock of its own.
#include "serried/launch/pulse.h"

#include <algorithm>

namespace serried::launch {
namespace {

constexpr Clock::duration in_ticks(Seconds seconds) {
  return std::chrono::duration_cast<Clock::duration>(seconds);
}

// More than a turn of the loop takes, which ends with the next beat at the latest.
constexpr Clock::duration kLongTurn = in_ticks(2 * Pulse::kBeatEvery);

}  // namespace

Pulse::Pulse(Seconds lost_after, Time now)
    : lost_after_(in_ticks(lost_after)), heard_at_(now), looked_at_(now), beat_at_(now) {}

void Pulse::heard(Time now) {
  heard_at_ = now;
  paused_ = false;
}

void Pulse::look(Time now) {
  const Clock::duration turn = now - looked_at_;
  looked_at_ = now;
  if (turn > kLongTurn) heard_at_ += turn;
}

bool Pulse::takes_beat(Time now) {
  if (now < beat_at_) return false;
  beat_at_ = now + in_ticks(kBeatEvery);
  return true;
}

Time Pulse::deadline() const {
  return paused_ ? beat_at_ : std::min(beat_at_, heard_at_ + lost_after_);
}

}  // namespace serried::launch
