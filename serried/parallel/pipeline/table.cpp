// What makes a table whole: every action once, each stage on one rank.
#include "serried/parallel/pipeline/table.h"

#include <algorithm>
#include <limits>
#include <tuple>

#include "serried/base/error.h"
#include "serried/parallel/pipeline/sharding_check.h"

namespace serried {
namespace {

using Kind = PipelineAction::Kind;

[[noreturn]] void refuse_table(const std::string& what, const std::string& fix) {
  raise<c10::ValueError>({"PipelineTable", what, fix});
}

// An action and where it stands, counted from 0.
struct PlacedAction {
  PipelineAction action;
  int64_t rank = 0;
  int64_t position = 0;
};

std::string on_rank(const PlacedAction& placed) {
  return to_cell(placed.action) + " on rank " + std::to_string(placed.rank);
}

void check_range(const PlacedAction& placed) {
  const auto fits = [](int64_t index) { return index >= 0 && index <= std::numeric_limits<int32_t>::max(); };
  if (fits(placed.action.stage) && fits(placed.action.microbatch)) return;
  refuse_table(on_rank(placed) + " is out of range", "stages and micro-batches are counted from 0, up to 2147483647");
}

// Those of micro-batches, sorted by stage, micro-batch and kind.
std::vector<PlacedAction> sorted_work(const std::vector<PipelineTable::Row>& rows) {
  std::vector<PlacedAction> work;
  for (size_t rank = 0; rank < rows.size(); ++rank) {
    if (rows[rank].empty()) {
      refuse_table("rank " + std::to_string(rank) + " has nothing to do",
                   "give every rank a stage, or leave the rank out");
    }
    for (size_t position = 0; position < rows[rank].size(); ++position) {
      const PlacedAction placed{rows[rank][position], int64_t(rank), int64_t(position)};
      check_range(placed);
      if (has_microbatch(placed.action.kind)) work.push_back(placed);
    }
  }
  const auto key = [](const PlacedAction& placed) {
    const PipelineAction& action = placed.action;
    return std::make_tuple(action.stage, action.microbatch, action.kind, placed.rank, placed.position);
  };
  std::sort(work.begin(), work.end(), [&](const PlacedAction& a, const PlacedAction& b) { return key(a) < key(b); });
  return work;
}

void check_nothing_twice(const std::vector<PlacedAction>& work) {
  const auto same = [](const PlacedAction& a, const PlacedAction& b) { return a.action == b.action; };
  const auto first = std::adjacent_find(work.begin(), work.end(), same);
  if (first == work.end()) return;
  const auto place = [](const PlacedAction& placed) {
    return "rank " + std::to_string(placed.rank) + " (its action " + std::to_string(placed.position) + ")";
  };
  refuse_table(to_cell(first->action) + " is there twice: on " + place(*first) + " and on " + place(*std::next(first)),
               "leave one of them out");
}

// Of a stage whose actions are on several ranks: the first action on another rank than the stage's first.
void check_one_rank_per_stage(const std::vector<PlacedAction>& work) {
  for (size_t i = 1; i < work.size(); ++i) {
    const PlacedAction &before = work[i - 1], &here = work[i];
    if (before.action.stage != here.action.stage || before.rank == here.rank) continue;
    refuse_table(on_rank(here) + " is on the wrong rank: " + on_rank(before),
                 "put all actions of stage " + std::to_string(here.action.stage) + " into one row");
  }
}

// `mine` are the actions of one stage and micro-batch, F B I W in this order, none twice.
void check_whole(const PipelineAction& forward, const std::vector<Kind>& mine) {
  const auto has = [&](Kind kind) { return std::find(mine.begin(), mine.end(), kind) != mine.end(); };
  const auto cell = [&](Kind kind) { return to_cell({kind, forward.stage, forward.microbatch}); };
  if (has(Kind::B) && (has(Kind::I) || has(Kind::W))) {
    refuse_table(cell(Kind::B) + " and " + cell(has(Kind::I) ? Kind::I : Kind::W) + " are both there",
                 "B is I and W in one: leave either out");
  }
  const bool split = has(Kind::I) || has(Kind::W);
  std::string missing;
  if (!has(Kind::F))
    missing = cell(Kind::F);
  else if (split && !has(Kind::I))
    missing = cell(Kind::I);
  else if (split && !has(Kind::W))
    missing = cell(Kind::W);
  else if (!split && !has(Kind::B))
    missing = cell(Kind::B);
  if (missing.empty()) return;
  refuse_table(missing + " is missing", "each stage needs F, and B or both I and W, for each micro-batch");
}

// Goes through stages and micro-batches in order, so that a number that is far too large costs nothing.
void check_nothing_missing(const std::vector<PlacedAction>& work, int64_t microbatches) {
  size_t next = 0;
  for (PipelineAction expected; next < work.size();) {
    std::vector<Kind> mine;
    for (; next < work.size(); ++next) {
      const PipelineAction& action = work[next].action;
      if (action.stage != expected.stage || action.microbatch != expected.microbatch) break;
      mine.push_back(action.kind);
    }
    check_whole(expected, mine);
    if (++expected.microbatch < microbatches) {
      if (next == work.size()) check_whole(expected, {});
      continue;
    }
    ++expected.stage;
    expected.microbatch = 0;
  }
}

}  // namespace

PipelineTable::PipelineTable(std::vector<Row> rows) : rows_(std::move(rows)) {
  if (rows_.empty()) refuse_table("there are no rows", "give a row of actions for each rank");
  const std::vector<PlacedAction> work = sorted_work(rows_);
  if (work.empty()) refuse_table("no action is F, B, I or W", "a table says what is computed, and where");
  for (const PlacedAction& placed : work) microbatches_ = std::max(microbatches_, placed.action.microbatch);
  ++microbatches_;
  check_nothing_twice(work);
  check_one_rank_per_stage(work);
  check_nothing_missing(work, microbatches_);
  rank_of_stage_.resize(size_t(work.back().action.stage) + 1);
  for (const PlacedAction& placed : work) rank_of_stage_[size_t(placed.action.stage)] = placed.rank;
  detail::check_sharding_actions(rows_, rank_of_stage_);
}

int64_t PipelineTable::rank_of(int64_t stage) const {
  if (stage >= 0 && stage < stages()) return rank_of_stage_[size_t(stage)];
  raise<c10::IndexError>({"PipelineTable", "there is no stage " + std::to_string(stage),
                          "stages are 0 to " + std::to_string(stages() - 1)});
}

std::vector<int64_t> PipelineTable::stages_of(int64_t rank) const {
  if (rank < 0 || rank >= ranks()) {
    raise<c10::IndexError>(
        {"PipelineTable", "there is no rank " + std::to_string(rank), "ranks are 0 to " + std::to_string(ranks() - 1)});
  }
  std::vector<int64_t> mine;
  for (int64_t stage = 0; stage < stages(); ++stage) {
    if (rank_of_stage_[size_t(stage)] == rank) mine.push_back(stage);
  }
  return mine;
}

void PipelineTable::check(const TableOptions& sizes) const {
  const auto expect = [](const std::string& of_what, int64_t has, int64_t wanted) {
    if (has == wanted) return;
    refuse_table("the number of " + of_what + " is " + std::to_string(has) + " in the table, but " +
                     std::to_string(wanted) + " in the pipeline",
                 "make a table for the pipeline's sizes");
  };
  expect("ranks", ranks(), sizes.ranks);
  expect("micro-batches", microbatches(), sizes.microbatches);
  for (int64_t rank = 0; rank < ranks(); ++rank) {
    expect("stages on rank " + std::to_string(rank), int64_t(stages_of(rank).size()), sizes.stages_per_rank);
  }
}

}  // namespace serried
