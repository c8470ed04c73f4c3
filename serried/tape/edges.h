// Where a recording begins and ends: for layers that keep results from one op to the next.
#pragma once

namespace serried::tape {

/// Calls `fn` on the recorded thread whenever a recording begins or ends there. Call it while the library is loaded.
/// What was kept before must not stand for an op inside, nor the other way round.
void at_edges(void (*fn)());

}  // namespace serried::tape
