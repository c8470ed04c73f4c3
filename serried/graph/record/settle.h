// Trusts a function after two recordings: what stayed the same may be replayed, what changed is refused.
#pragma once

#include "serried/graph/record/recorder.h"

namespace serried::graph {

/// Where two recordings ran different ops; empty where they did not.
std::string first_difference(const Recording& first, const Recording& second);

/// Makes `second` replayable: external values become persistent or constant. CaptureError for a scalar or a tensor made
/// off the tape that changed between the two.
void settle(const Recording& first, Recording& second);

}  // namespace serried::graph
