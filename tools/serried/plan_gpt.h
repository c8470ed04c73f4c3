// What a training step of a small GPT would do on many ranks, found on this machine alone.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "serried/graph/graph.h"
#include "serried/graph/text/report.h"
#include "serried/parallel/explain_module.h"

namespace serried::tools {

struct PlanWords {
  std::optional<int64_t> ranks = {};  // none: as many as the axes make, or 8 where nothing says how many
  std::optional<int64_t> dp = {};     // copies of the model, or of what is fully sharded; none: what is left
  std::optional<int64_t> fsdp = {};   // ranks that fully_shard cuts a copy over; none: DistributedDataParallel
  int64_t tp = 1;                     // ranks that cut every block by styles
  // The model of examples/06_gpt.cpp.
  int64_t layers = 3;
  int64_t width = 128;
  int64_t heads = 4;
  int64_t context = 64;
  int64_t vocabulary = 64;
  int64_t batch = 4;  // sequences of one data-parallel rank

  int num_timed = 0;  // replays of the captured step that are timed
};

/// What a rank holds from one step to the next, and beside it while a step runs.
struct PlanMemory {
  int64_t parameters = 0;
  int64_t gradients = 0;
  int64_t optimizer = 0;        // AdamW's two moments
  int64_t gathered = 0;         // most that is whole at once, with what is on its way
  int64_t whole_gradients = 0;  // most that waits to be reduced

  int64_t sum() const { return parameters + gradients + optimizer + gathered + whole_gradients; }
};

struct Plan {
  graph::Graph graph;  // of rank 0, with axes of the mesh as names of groups
  graph::GraphReport report;
  PlanMemory memory;
  ModuleExplanation modules;  // what each of them sends in a step that is not captured
  std::string mesh;           // "mesh dp=4 tp=2"
  int64_t num_parameters = 0;
  std::optional<double> replay_us = {};  // median of the timed ones, in which collectives take no time
};

struct PlanAxis {
  std::string name;
  int64_t size = 1;
};

/// The mesh that `make_plan` takes, whose last axis counts fastest. ValueError as there.
std::vector<PlanAxis> mesh_axes(const PlanWords& words);

/// Told before each of the stages: how many are done, and what comes next.
using OnStage = std::function<void(int64_t done, std::string_view next)>;
inline constexpr int64_t kPlanStages = 4;

/// Captures a step of rank 0: forward, backward, gradients averaged over "dp" and "fsdp", AdamW; parameters cut over
/// "fsdp", blocks over "tp". ValueError where the numbers do not fit together.
Plan make_plan(const PlanWords& words, const OnStage& on_stage);

}  // namespace serried::tools
