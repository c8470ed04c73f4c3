// Where the ranks of a generation come together: each says how far it is, and those behind take the state of the
// others.
#pragma once

#include "serried/checkpoint/state.h"
#include "serried/comm/groups/group.h"
#include "serried/elastic/choice.h"

namespace serried::detail {

/// How far this rank is, with what it keeps.
struct Standing {
  int64_t step = 0;
  Condition condition = Condition::fresh;
};

/// Brings all ranks of `group` to one state, with the same bits, and to its step. Every rank calls it. `mine` is true
/// to what is kept at every moment: an error of communication may end it anywhere, and the next meeting begins from
/// there. Failure, on all ranks, where they keep different things or no whole state is left.
void bring_to_one_state(const Group& group, const checkpoint::Contents& kept, Standing& mine);

}  // namespace serried::detail
