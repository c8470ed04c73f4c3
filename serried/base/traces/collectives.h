// The parts of each collective, found in the files of its ranks: who came last, and who waited for it.
#pragma once

#include <set>
#include <span>
#include <string>
#include <vector>

#include "serried/base/traces/timeline.h"

namespace serried::trace {

/// Calls of the ranks that are one collective.
struct Collective {
  std::span<const Call> calls;  // one per rank, two or more
  bool is_whole = false;        // every rank of the group is there, and none has failed

  /// The rank that the others had to wait for.
  const Call& last() const;
};

/// Sorts `timeline.calls`, whose parts the result names. Calls without a number (send, recv), alone, or with a number
/// that their rank has used twice or more ranks than the group has, are left out.
std::vector<Collective> match(Timeline& timeline);

/// How a clock is put right.
struct ClockShift {
  double shift_us = 0;       // to be added
  double doubt_us = 0;       // it may be so much more or less
  int num_collectives = 0;   // that say so; 0: nothing is known
  bool contradicts = false;  // no one shift fits them all: the clocks drift
};

/// Hosts do not agree about the time, but no rank can be through with an all_reduce before all have called it. What
/// has to be added to the times of `moved` ranks for that to hold, as the times of `fixed` ranks are right.
ClockShift find_shift(const Timeline& timeline, const std::vector<Collective>& collectives, const std::set<int>& fixed,
                      const std::set<int>& moved);

}  // namespace serried::trace
