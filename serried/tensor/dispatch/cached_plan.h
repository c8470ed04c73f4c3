// A plan made ready for one rank: what to move, which arguments to replace, how to wrap.
#pragma once

#include <c10/util/SmallVector.h>

#include <memory>
#include <optional>
#include <vector>

#include "serried/spmd/fixups.h"
#include "serried/spmd/plan.h"
#include "serried/spmd/redistribute.h"
#include "serried/tensor/dispatch/arguments.h"

namespace serried::detail {

/// An input that must be placed otherwise first.
struct InputMove {
  int slot;
  Placements to;
  std::vector<spmd::Step> steps;
  bool communicates;
  std::vector<spmd::Step> back;  // of an input that the op writes: the new value goes where the tensor lies
};

/// How one result lies. What was found last is kept with the local sizes it was found for.
struct CachedOutput {
  Placements placements;
  c10::DimVector sizes;                        // global; -1 and missing: as the local result says
  std::optional<c10::DimVector> strides = {};  // global, of a view; none: made contiguous
  SpecContentPtr content = {};
  c10::weak_intrusive_ptr<Spec> spec{SpecPtr()};  // of the content, while somebody uses it
  c10::DimVector local_sizes = {};
  c10::DimVector local_strides = {};
  c10::ScalarType dtype = c10::ScalarType::Undefined;
};

/// All outputs of one return value: one, or for a list one per element, or one for all elements.
struct CachedReturn {
  bool shared = false;  // one description serves every element
  std::vector<CachedOutput> elements;
};

/// Outlives the mesh it was made for, so it holds neither that nor specs: a call has them in its arguments.
struct CachedPlan {
  Sizes mesh_shape;
  c10::DimVector own_coordinate;
  spmd::Plan plan;
  std::vector<spmd::TensorArg> tensors;
  std::vector<SpecContentPtr> contents;  // kept: content that died would come back under another number, and miss
  std::vector<InputMove> moves;
  std::vector<std::pair<int, c10::IValue>> replaced;  // arguments that are not tensors, localised once
  std::vector<std::pair<const spmd::Fixup*, spmd::FixupPattern>> fixups;  // that must run on each call
  mutable std::vector<CachedReturn> returns;
  /// This rank's part of a cut dim is empty: it calls the op as the first rank of those axes would, with zeros.
  std::vector<int64_t> stand_in_axes;
  /// Another input is Partial on such an axis (a bias): what the zeros give is this rank's share of it.
  bool stand_in_counts = false;
  c10::DimVector coordinate;  // this rank's, or the one it stands in for
  bool is_fast = false;       // local tensors in, wrap out, nothing else
  /// The integers of `replaced`, for calls that are not boxed.
  std::vector<std::pair<int, std::vector<int64_t>>> replaced_integers;
  bool is_default = false;

  Position position() const { return {mesh_shape, coordinate}; }
  Position own_position() const { return {mesh_shape, own_coordinate}; }
};

/// The plan for this call: found, or made and kept.
const CachedPlan& plan_for(OpInfo& info, const Arguments& arguments, const torch::jit::Stack& stack,
                           std::unique_ptr<CachedPlan>& uncached);

/// The plan for this call if it is at hand and `is_fast`, else null.
const CachedPlan* find_fast_plan(OpInfo& info, const Arguments& arguments);

/// Where a call is planned, whichever rank asks.
struct PlanSite {
  Sizes mesh_shape;
  std::vector<spmd::CostModel> costs = {};  // per axis; none: cost_model() on all
};

/// What a plan was chosen from: of the whole call, or of the first element of a foreach op.
struct PlanTrace {
  std::vector<int> slots;            // its tensors among those of the call
  std::optional<spmd::Bound> bound;  // none: no rule
  spmd::Candidates weighed;          // per axis
  spmd::Plan plan;
};

/// What a call does on every rank alike: rule, moves, results. The rest of a CachedPlan is left as it is.
CachedPlan plan_everywhere(const OpInfo& info, const spmd::OpCall& call, const std::vector<Placements>& current,
                           const PlanSite& site, PlanTrace* trace = nullptr);

/// A plan made anew, for this rank.
std::unique_ptr<CachedPlan> build_plan(const OpInfo& info, const Arguments& arguments,
                                       c10::ArrayRef<c10::IValue> values);

/// Runs a call whose plan `is_fast`: arguments on the stack become results.
void run_fast(const c10::OperatorHandle& op, const OpInfo& info, const CachedPlan& plan, const Arguments& arguments,
              torch::jit::Stack& stack);

/// Return `r` of a fast call as a DTensor.
at::Tensor wrap_fast(const OpInfo& info, const CachedPlan& plan, const Arguments& arguments, int r, at::Tensor local);

/// Raises where an argument that the op writes is plain or a view that does not alias its base.
void check_writable(const OpInfo& info, const Arguments& arguments);

/// The fallback itself, for a boxed call.
void run_boxed(const c10::OperatorHandle& op, torch::jit::Stack& stack);

/// The same for a call on DTensors whose arguments are collected.
void run_collected(const c10::OperatorHandle& op, OpInfo& info, const Arguments& arguments, torch::jit::Stack& stack);

/// Runs any call; autograd is excluded by the caller.
void run_planned(const c10::OperatorHandle& op, const OpInfo& info, const CachedPlan& plan, const Arguments& arguments,
                 torch::jit::Stack& stack);

}  // namespace serried::detail
