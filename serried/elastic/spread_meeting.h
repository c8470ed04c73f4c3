// Where ranks come together that each hold parts: what is built for the ranks that are left takes its state from those
// that have it.
#pragma once

#include "serried/checkpoint/state.h"
#include "serried/comm/groups/group.h"
#include "serried/elastic/meeting.h"
#include "serried/elastic/spread_versions.h"

namespace serried::detail {

/// Fills what is in `built`, which every rank of `group` has made for these ranks, with the state of the highest step
/// that the ranks have together, however it was cut. `mine` and `versions` are true at every moment: an error of
/// communication may end it anywhere, and the next meeting begins from there. Failure, on all ranks, where a part is
/// lost, or ranks contradict each other.
void bring_parts_together(const Group& group, const checkpoint::Contents& built, SpreadVersions& versions,
                          Standing& mine);

}  // namespace serried::detail
