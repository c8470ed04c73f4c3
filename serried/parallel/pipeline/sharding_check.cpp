// One walk along each row, with the state of every stage.
#include "serried/parallel/pipeline/sharding_check.h"

#include "serried/base/error.h"

namespace serried::detail {
namespace {

using Kind = PipelineAction::Kind;

struct ShardingState {
  bool by_table = false;  // the table says when the stage is gathered
  bool gathered = false;
  bool reduced = false;
};

[[noreturn]] void refuse_sharding(const PipelineAction& action, int64_t rank, const std::string& what,
                                  const std::string& fix) {
  raise<c10::ValueError>({"PipelineTable", to_cell(action) + " on rank " + std::to_string(rank) + " " + what, fix});
}

void check_place(const PipelineAction& action, int64_t rank, const std::vector<int64_t>& rank_of_stage) {
  if (action.stage >= int64_t(rank_of_stage.size())) {
    refuse_sharding(action, rank, "is out of range: no action computes in this stage",
                    "stages are 0 to " + std::to_string(rank_of_stage.size() - 1));
  }
  const int64_t home = rank_of_stage[size_t(action.stage)];
  if (home == rank) return;
  refuse_sharding(action, rank, "is on the wrong rank: the stage is on rank " + std::to_string(home),
                  "move it to that row");
}

void advance(const PipelineAction& action, int64_t rank, ShardingState& state) {
  switch (action.kind) {
    case Kind::unshard:
      if (state.gathered) refuse_sharding(action, rank, "finds the stage unsharded already", "leave it out");
      state.gathered = true;
      return;
    case Kind::reshard:
      if (!state.gathered) refuse_sharding(action, rank, "has no UNSHARD before it", "leave it out, or add that");
      state.gathered = false;
      return;
    case Kind::reduce:
      if (state.reduced) refuse_sharding(action, rank, "is there twice", "leave one of them out");
      state.reduced = true;
      return;
    default: break;
  }
  if (state.by_table && !state.gathered) {
    refuse_sharding(action, rank, "comes while the stage is not unsharded",
                    "put " + to_cell({.kind = Kind::unshard, .stage = action.stage}) + " before it");
  }
  if (state.reduced && action.kind != Kind::F) {
    refuse_sharding(action, rank, "adds to gradients that are reduced already",
                    "put " + to_cell({.kind = Kind::reduce, .stage = action.stage}) + " after it");
  }
}

}  // namespace

void check_sharding_actions(const std::vector<PipelineTable::Row>& rows, const std::vector<int64_t>& rank_of_stage) {
  std::vector<ShardingState> states(rank_of_stage.size());
  for (size_t rank = 0; rank < rows.size(); ++rank) {
    for (const PipelineAction& action : rows[rank]) {
      if (has_microbatch(action.kind)) continue;
      check_place(action, int64_t(rank), rank_of_stage);
      if (action.kind != Kind::reduce) states[size_t(action.stage)].by_table = true;
    }
  }
  for (size_t rank = 0; rank < rows.size(); ++rank) {
    for (const PipelineAction& action : rows[rank]) advance(action, int64_t(rank), states[size_t(action.stage)]);
  }
}

}  // namespace serried::detail
