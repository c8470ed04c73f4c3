// Trusts a function after two recordings: what stayed the same may be replayed, what changed is refused.
#pragma once

#include "serried/graph/record/recorder.h"

namespace serried::graph {

/// Where two recordings ran different ops; empty where they did not.
std::string first_difference(const Recording& first, const Recording& second);

/// Makes `second`, which ran the same ops, replayable: external values become persistent or constant. CaptureError for
/// a scalar that changed between the two, and for a tensor made without an op that did.
void make_replayable(const Recording& first, Recording& second);

}  // namespace serried::graph
