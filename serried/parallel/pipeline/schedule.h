// The schedules that are known by name, and their tables for any size.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "serried/parallel/pipeline/table.h"

namespace serried {

/// Rank r of p has stages r, r + p, ...; of ZBV and DualPipeV it has r and 2p - 1 - r.
enum class Schedule {
  GPipe,                  // all forwards, then all backwards; one stage per rank
  OneFOneB,               // one forward, one backward in turn, as few in flight as can be; one stage per rank
  Interleaved,            // the same with any number of stages per rank: a smaller bubble, more messages
  LoopedBFS,              // GPipe with any number of stages per rank
  InterleavedZeroBubble,  // Interleaved with backwards split, so that weights' gradients fill bubbles
  ZBV,                    // the same on two stages per rank that form a V: first and last stage on one rank
  DualPipeV,              // such a V where forwards and whole backwards of different stages stand side by side
};

/// "1F1B" of OneFOneB, of all others their name here.
std::string to_string(Schedule schedule);

/// By its name here or in PyTorch; case, '-' and '_' do not count. ValueError with the known names.
///     parse_schedule("zbv"), parse_schedule("1F1B"), parse_schedule("looped-bfs")
Schedule parse_schedule(std::string_view name);

/// How many stages each rank has, where the schedule leaves no choice: 1 or 2.
std::optional<int64_t> stages_per_rank_of(Schedule schedule);

/// The table of `schedule`. Every number of micro-batches has one, also fewer than there are stages. Of each stage,
/// gradients are added in the order of micro-batches. ValueError for sizes below 1 and stages that do not fit.
///     pipeline_table(Schedule::OneFOneB, {.ranks = 4, .microbatches = 8}).to_csv()
PipelineTable pipeline_table(Schedule schedule, const TableOptions& sizes);

}  // namespace serried
