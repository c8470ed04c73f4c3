// The plan of one op call: per mesh axis the cheapest row, hence where inputs go and how outputs lie.
#pragma once

#include <string>
#include <vector>

#include "serried/spmd/bind.h"
#include "serried/spmd/cost.h"
#include "serried/spmd/rows.h"

namespace serried::spmd {

struct OutputPlan {
  Placements placements;
  bool list = false;     // a TensorList whose elements all lie like this
  c10::DimVector sizes;  // global; -1: as the local result says
};

/// Where an input stands in its rule: the term of the sum, and whether the rule is linear in it.
struct InputTerm {
  int term = 0;
  bool linear = true;
};

struct Plan {
  std::string rule;                // the text; empty: the replicate default
  std::vector<Placements> inputs;  // parallel to call.tensors()
  std::vector<OutputPlan> outputs;
  std::vector<FixupPattern> fixups;
  std::vector<int> rows;  // per axis the index of the row taken
  double cost = 0;
  std::vector<InputTerm> terms = {};  // parallel to inputs; empty for the default
  bool is_default() const { return rule.empty(); }
};

/// What limits the choice.
struct PlanRequest {
  std::vector<Placements> current;  // of each input
  c10::IntArrayRef mesh_shape;
  /// Inputs the op writes to: their placements cannot change, and output k that aliases input i must lie like it.
  /// A plan without such a row leaves the input elsewhere; the caller writes back.
  std::vector<std::pair<int, int>> written;  // (input, output or -1)
  std::vector<CostModel> costs = {};         // per axis; none: cost_model() on all
};

/// One row as the planner saw it, for explain.
struct Candidate {
  Row row;
  double cost = 0;       // microseconds by the cost model
  int64_t bytes = 0;     // that this rank would send
  std::string rejected;  // why it cannot be taken; empty: it can
};

/// The candidates of each axis, in order, given what the axes before it chose.
using Candidates = std::vector<std::vector<Candidate>>;

/// `weighed`, where it is given, gets what the plan was chosen from.
Plan make_plan(const Bound& bound, const Call& call, const PlanRequest& request, Candidates* weighed = nullptr);

/// All inputs to Replicate, all outputs Replicate.
Plan default_plan(const Call& call, size_t mesh_ndim);

/// Grows with every change of what plans are made by, users' rules and cost models: a plan made under another version
/// is stale. Thread-safe.
uint64_t plans_version();
void make_plans_stale();

}  // namespace serried::spmd
