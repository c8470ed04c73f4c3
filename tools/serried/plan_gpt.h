// What a training step of a small GPT would do on many ranks, found on this machine alone.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "serried/graph/graph.h"
#include "serried/graph/text/report.h"

namespace serried::tools {

struct PlanWords {
  int64_t ranks = 8;
  int64_t tensor_parallel = 1;
  // The model of examples/06_gpt.cpp.
  int64_t layers = 3;
  int64_t width = 128;
  int64_t heads = 4;
  int64_t context = 64;
  int64_t vocabulary = 64;
  int64_t batch = 4;  // sequences of one data-parallel rank
};

struct Plan {
  graph::Graph graph;  // of rank 0, with axes of the mesh as names of groups
  graph::GraphReport report;
  std::string mesh;  // "mesh dp=4 tp=2"
  int64_t num_parameters = 0;
};

/// Told before each of the stages: how many are done, and what comes next.
using OnStage = std::function<void(int64_t done, std::string_view next)>;
inline constexpr int64_t kPlanStages = 4;

/// Captures a step of rank 0: forward, backward, gradients averaged over "dp", AdamW; blocks cut over "tp". ValueError
/// where the numbers do not fit together.
Plan make_plan(const PlanWords& words, const OnStage& on_stage);

}  // namespace serried::tools
