// Ranks compare the collectives of their graphs before one of them replays.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "serried/comm/groups/group.h"
#include "serried/graph/graph.h"

namespace serried::graph {

/// Which captured function this is to the ranks of a group: its number among those that this thread has recorded with
/// collectives on the group. Ranks run these in the same order, whatever else one of them captures.
class FunctionNumbers {
 public:
  int64_t on(const Group& group);

 private:
  std::map<std::string, int64_t> by_group_;
};

/// Which recording this is; the same on all ranks that run the same program.
struct RecordedCall {
  FunctionNumbers& function;
  int64_t call = 0;  // number of its call
};

/// How a recording ended that made no graph.
enum class RecordingStatus : uint8_t {
  pending,  // the function has to be recorded once more
  refused,  // it cannot be captured, and raised
  eager,    // it cannot be captured, and runs eagerly for good
};

/// Says so to the other ranks of `groups`, so that nobody waits for this one.
void tell_ranks(const std::vector<Group>& groups, RecordedCall call, RecordingStatus status);

/// What a rank is about to replay.
struct RankedGraphs {
  const Graph& recorded;
  const Graph& replayed;                     // the same after all passes
  const std::vector<Group>& groups;          // of its collectives
  const std::vector<std::string>& together;  // tape::replay_together
};

/// Whether every other rank of each group that the graph uses has recorded the same collectives on it, and whether the
/// same holds for them, for the groups that they use, and so on: true and false are the same on all ranks that are
/// linked by groups. False where one has to record once more: all shall replay from the same call on. Where passes left
/// the collectives as they were recorded, a rank that replays already counts too, but on a group of `together`.
/// CaptureError that names both ranks and the first difference where another rank recorded others in the same call, or
/// refused the function, or told nothing within the timeout of the group. Goes through the groups' stores and runs no
/// collective, so ranks that replay need not take part.
bool agree_on_collectives(const RankedGraphs& graphs, RecordedCall call);

}  // namespace serried::graph
