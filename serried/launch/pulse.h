// Whether the launcher at the other end of a connection lives, by its own words: the kernel of a frozen host goes on
// acknowledging what is sent to it.
#pragma once

#include "serried/launch/loop.h"
#include "serried/launch/options.h"

namespace serried::launch {

/// One end of a connection. Both ends say something every `kBeatEvery`, and are lost after a silence of `lost_after`.
class Pulse {
 public:
  static constexpr Seconds kBeatEvery{0.5};

  Pulse(Seconds lost_after, Time now);

  /// The other end has said something.
  void heard(Time now);
  /// The other end has said that it is being stopped, by Ctrl-Z: its silence means nothing.
  void pause() { paused_ = true; }

  /// Call it in every turn. If this process itself stood still in between, what the others said meanwhile is still to
  /// be read: that time counts for nothing.
  void look(Time now);

  /// Whether to say something now; if so, not again for a while.
  bool takes_beat(Time now);
  bool is_lost(Time now) const { return !paused_ && now - heard_at_ >= lost_after_; }

  /// When one of the two will be so.
  Time deadline() const;

 private:
  Clock::duration lost_after_;
  Time heard_at_;
  Time looked_at_;
  Time beat_at_;
  bool paused_ = false;
};

}  // namespace serried::launch
