// Picks per mesh axis the row that moves least.
#include "serried/spmd/plan.h"

#include <algorithm>
#include <atomic>
#include <limits>

#include "serried/base/error.h"

namespace serried::spmd {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();
// A rename on an axis of one rank: free, but a row that needs none is better.
constexpr double kRename = 1e-3;
// What is put off may never come due: the result may be dropped, or wanted cut. But a gradient is read twice, for that
// of a weight and for that of an input.
constexpr double kPutOff = 0.999;
constexpr double kPutOffGradient = 2;

// Choices so far: what the axes to the left have taken.
class Planner {
 public:
  Planner(const Bound& bound, const Call& call, const PlanRequest& request)
      : bound_(bound), call_(call), request_(request), rows_(rows(bound)), shards_(bound.factors.size(), 1) {
    targets_ = request.current;
    costs_ = request.costs;
    if (costs_.empty()) costs_.assign(request.mesh_shape.size(), cost_model());
    outputs_.assign(bound.outputs.size(), Placements(request.mesh_shape.size()));
  }

  std::vector<Candidate> candidates(size_t axis) const;
  size_t choose(size_t axis, const std::vector<Candidate>& found) const;
  void take(size_t axis, const Candidate& chosen);

  std::vector<Placements> targets_;
  std::vector<Placements> outputs_;

 private:
  Row instantiate(const Row& row, const Placement& split_like) const;
  int64_t split_before(const BoundTensor& tensor, int64_t dim, int16_t factor) const;
  void add(std::vector<Candidate>& found, Row row, size_t axis) const;
  std::string why_not(const Row& row, size_t axis) const;
  int64_t bytes_on_axis(size_t input, size_t axis) const;
  bool cuts_something_new(const Row& row, size_t axis) const;
  bool counts_from_offset(int16_t factor) const;
  double put_off_cost(const Row& row, size_t axis) const;
  bool keeps_written(const Row& row, size_t axis) const;

  const Bound& bound_;
  const Call& call_;
  const PlanRequest& request_;
  std::vector<Row> rows_;
  std::vector<CostModel> costs_;  // per axis
  std::vector<int64_t> shards_;   // per factor: parts it is cut in so far
};

// The parts that factors before `factor` in a compound dim still have locally: each of them is cut separately.
int64_t Planner::split_before(const BoundTensor& tensor, int64_t dim, int16_t factor) const {
  int64_t split = 1;
  for (int16_t other : tensor.dims[dim]) {
    if (other == factor) break;
    split *= bound_.factors[other].size / shards_[other];
  }
  return split;
}

Row Planner::instantiate(const Row& row, const Placement& split_like) const {
  Row result = row;
  const auto adjust = [&](Placement& placement, const BoundTensor& tensor) {
    if (!placement.is_shard()) return;
    if (placement.is_strided()) {
      placement = StridedShard(placement.dim(), split_before(tensor, placement.dim(), row.factor));
    } else if (split_like.is_strided()) {
      placement = split_like.along(placement.dim());
    }
  };
  for (size_t i = 0; i < result.inputs.size(); ++i) adjust(result.inputs[i], bound_.inputs[i]);
  for (size_t o = 0; o < result.outputs.size(); ++o) adjust(result.outputs[o], bound_.outputs[o]);
  return result;
}

// Bytes of input `i` as it lies on the other axes.
int64_t Planner::bytes_on_axis(size_t i, size_t axis) const {
  const TensorArg& tensor = call_.tensor(i);
  int64_t parts = 1;
  for (size_t a = 0; a < request_.mesh_shape.size(); ++a) {
    if (a != axis && targets_[i][a].is_shard()) parts *= request_.mesh_shape[a];
  }
  const int64_t bytes = tensor.numel() * int64_t(c10::elementSize(tensor.dtype));
  return (bytes + parts - 1) / parts;
}

bool Planner::cuts_something_new(const Row& row, size_t axis) const {
  if (row.factor < 0) return false;
  for (size_t i = 0; i < row.inputs.size(); ++i) {
    if (row.inputs[i].is_shard() && request_.current[i][axis] == row.inputs[i]) return false;
  }
  return true;
}

int64_t elements_of_results(const Bound& bound, int64_t where_unknown) {
  int64_t all = 0;
  for (size_t o = 0; o < bound.outputs.size(); ++o) {
    int64_t elements = 1;
    for (size_t d = 0; d < bound.outputs[o].dims.size(); ++d) {
      const int64_t size = output_size(bound, o, d);
      elements = size < 0 || elements < 0 ? -1 : elements * size;
    }
    all += elements < 0 ? where_unknown : elements;
  }
  return all;
}

// A pending sum that an op hands on has to be reduced later, as large as the op has made it. So it is handed on where
// that is less than here (a sum over a dim) or the same (a scale), and reduced here where the result is wider, or where
// something whole would have to become pending to join it: a residual stream that is pending is reduced anew by every
// layer that reads it. Ops that only move elements, views among them, hand on what they get.
double Planner::put_off_cost(const Row& row, size_t axis) const {
  if (bound_.rule.moves || row.factor >= 0) return 0;
  for (size_t i = 0; i < row.inputs.size(); ++i) {
    const int64_t elements = call_.tensor(i).numel();
    if (!row.inputs[i].is_partial() || request_.current[i][axis] != row.inputs[i] || elements == 0) continue;
    const double growth = double(elements_of_results(bound_, elements)) / double(elements);
    const int64_t bytes = int64_t(double(bytes_on_axis(i, axis)) * growth);
    const std::string& name = call_.schema().arguments()[size_t(call_.tensor(i).argument)].name();
    return (name.starts_with("grad") ? kPutOffGradient : kPutOff) *
           move_cost(row.inputs[i], Replicate(), bytes, request_.mesh_shape[axis], costs_[axis]);
  }
  return 0;
}

bool Planner::keeps_written(const Row& row, size_t axis) const {
  for (const auto& [input, output] : request_.written) {
    const Placement& now = request_.current[input][axis];
    if (row.inputs[input] != now) return false;
    if (output >= 0 && size_t(output) < row.outputs.size() && row.outputs[output] != now) return false;
  }
  return true;
}

// Sums and averages of what cannot be summed or averaged.
std::string unreducible(const Placement& placement, c10::ScalarType dtype) {
  if (!placement.is_partial()) return {};
  if (dtype == c10::ScalarType::Bool && placement.reduce() != ReduceKind::max &&
      placement.reduce() != ReduceKind::min) {
    return "a bool cannot be summed over ranks";
  }
  if (placement.reduce() == ReduceKind::avg && c10::isIntegralType(dtype, true))
    return "integers have no exact average";
  const bool ordered = placement.reduce() == ReduceKind::max || placement.reduce() == ReduceKind::min;
  if (ordered && c10::isComplexType(dtype)) return "complex numbers have no order";
  return {};
}

std::string Planner::why_not(const Row& row, size_t axis) const {
  for (size_t i = 0; i < row.inputs.size(); ++i) {
    const std::string reason = unreducible(row.inputs[i], call_.tensor(i).dtype);
    if (!reason.empty()) return reason;
  }
  if (row.factor < 0) return {};
  const Factor& factor = bound_.factors[row.factor];
  const int64_t parts = shards_[row.factor] * request_.mesh_shape[axis];
  const bool must_divide = factor.must_divide || bound_.rule.has("even");
  if (must_divide && factor.size % parts != 0) {
    return std::string("factor ") + factor.letter + " of size " + std::to_string(factor.size) +
           " is not divisible by " + std::to_string(parts);
  }
  return {};
}

void Planner::add(std::vector<Candidate>& found, Row row, size_t axis) const {
  Candidate candidate{.row = std::move(row), .cost = 0, .bytes = 0, .rejected = {}};
  candidate.rejected = why_not(candidate.row, axis);
  const int64_t ranks = request_.mesh_shape[axis];
  int64_t largest = 0;
  for (size_t i = 0; i < candidate.row.inputs.size(); ++i) {
    const Placement& now = request_.current[i][axis];
    const Placement& then = candidate.row.inputs[i];
    const int64_t bytes = bytes_on_axis(i, axis);
    largest = std::max(largest, bytes);
    if (now == then) continue;
    candidate.cost += ranks == 1 ? kRename : move_cost(now, then, bytes, ranks, costs_[axis]);
    candidate.bytes += bytes_sent(now, then, bytes, ranks);
  }
  // Cutting what nobody had cut only puts the gather off: somebody will want the whole again.
  if (ranks > 1 && cuts_something_new(candidate.row, axis)) {
    candidate.cost += move_cost(Shard(0), Replicate(), largest, ranks, costs_[axis]);
  }
  candidate.cost += put_off_cost(candidate.row, axis);
  if (candidate.cost == kNever && candidate.rejected.empty()) candidate.rejected = "a shard cannot become partial";
  if (!candidate.rejected.empty()) candidate.cost = kNever;
  found.push_back(std::move(candidate));
}

// Whether a fix-up asks where a part of the factor begins, as if it were one run.
bool Planner::counts_from_offset(int16_t factor) const {
  for (const FixupPattern& fixup : bound_.rule.fixups) {
    if (fixup.name == "diagonal") return true;
    const bool is_named = fixup.letters.find(bound_.factors[size_t(factor)].letter) != fixup.letters.npos;
    if (is_named && (fixup.name == "pick" || fixup.name == "target")) return true;
  }
  return false;
}

std::vector<Candidate> Planner::candidates(size_t axis) const {
  std::vector<Candidate> found;
  for (const Row& row : rows_) {
    // One rank has all of a dim of one element: nothing is cut so that is not already, like the bias of one output.
    const bool is_single = row.factor >= 0 && bound_.factors[row.factor].size == 1;
    if (!is_single || !cuts_something_new(row, axis)) add(found, instantiate(row, Replicate()), axis);
    // Only a dim of one factor can be cut in another order: a merged or split one means another factor then.
    if (row.factor < 0 || bound_.factors[row.factor].must_divide || counts_from_offset(row.factor)) continue;
    // The same cut in the strided order that an input already has.
    for (size_t i = 0; i < row.inputs.size(); ++i) {
      const Placement& now = request_.current[i][axis];
      if (!now.is_strided() || !row.inputs[i].is_shard(now.dim()) || row.inputs[i].is_strided()) continue;
      add(found, instantiate(row, now), axis);
      break;
    }
  }
  return found;
}

size_t Planner::choose(size_t axis, const std::vector<Candidate>& found) const {
  const auto cheapest = [&](auto&& allowed) {
    size_t best = found.size();
    for (size_t k = 0; k < found.size(); ++k) {
      if (!allowed(found[k]) || found[k].cost == kNever) continue;
      if (best == found.size() || found[k].cost < found[best].cost) best = k;
    }
    return best;
  };
  if (!request_.written.empty()) {
    const size_t kept = cheapest([&](const Candidate& c) { return keeps_written(c.row, axis); });
    if (kept < found.size()) return kept;
  }
  const size_t best = cheapest([](const Candidate&) { return true; });
  return best < found.size() ? best : 0;
}

void Planner::take(size_t axis, const Candidate& chosen) {
  for (size_t i = 0; i < targets_.size(); ++i) targets_[i][axis] = chosen.row.inputs[i];
  for (size_t o = 0; o < outputs_.size(); ++o) outputs_[o][axis] = chosen.row.outputs[o];
  if (chosen.row.factor >= 0) shards_[chosen.row.factor] *= request_.mesh_shape[axis];
}

OutputPlan describe_output(const Bound& bound, size_t o, const Placements& placements) {
  OutputPlan output{.placements = placements, .list = bound.outputs[o].list, .sizes = {}};
  output.sizes.assign(bound.outputs[o].dims.size(), -1);
  for (const Placement& placement : placements) {
    if (placement.is_shard()) output.sizes[placement.dim()] = output_size(bound, o, placement.dim());
  }
  return output;
}

// Only the shapes of the inputs matter: nothing moves, outputs lie like the first input where they are as large.
Plan shape_plan(const Bound& bound, const Call& call, const PlanRequest& request) {
  Plan plan{.rule = std::string(bound.rule.text), .inputs = request.current, .outputs = {}, .fixups = {}, .rows = {}};
  plan.fixups.assign(bound.rule.fixups.begin(), bound.rule.fixups.end());
  Placements like = request.current.empty() ? Placements(request.mesh_shape.size()) : request.current[0];
  const auto asked = call.integers("size");
  const bool same = !request.current.empty() && (!asked || c10::IntArrayRef(*asked) == call.tensor(0).sizes);
  like = same ? without_partial(std::move(like)) : Placements(like.size(), Replicate());
  const size_t ndim = asked ? asked->size() : call.tensor(0).sizes.size();
  OutputPlan output{.placements = like, .list = false, .sizes = c10::DimVector(ndim, -1)};
  for (const Placement& placement : like) {
    if (placement.is_shard()) output.sizes[placement.dim()] = call.tensor(0).sizes[placement.dim()];
  }
  // A fill of a pending sum cannot be done part by part: the caller gives it the whole and writes back.
  for (const auto& [input, out] : request.written) {
    plan.inputs[input] = without_partial(std::move(plan.inputs[input]));
  }
  plan.outputs.assign(std::max<size_t>(bound.outputs.size(), 1), output);
  return plan;
}

}  // namespace

Plan make_plan(const Bound& bound, const Call& call, const PlanRequest& request, Candidates* weighed) {
  if (bound.rule.has("shape")) return shape_plan(bound, call, request);
  Planner planner(bound, call, request);
  Plan plan{.rule = std::string(bound.rule.text), .inputs = {}, .outputs = {}, .fixups = {}, .rows = {}};
  plan.fixups.assign(bound.rule.fixups.begin(), bound.rule.fixups.end());
  for (size_t axis = 0; axis < request.mesh_shape.size(); ++axis) {
    std::vector<Candidate> found = planner.candidates(axis);
    const size_t chosen = planner.choose(axis, found);
    plan.rows.push_back(int(chosen));
    plan.cost += found[chosen].cost;
    planner.take(axis, found[chosen]);
    if (weighed != nullptr) weighed->push_back(std::move(found));
  }
  plan.inputs = planner.targets_;
  for (const BoundTensor& input : bound.inputs) plan.terms.push_back({input.term, input.linear});
  for (size_t o = 0; o < bound.outputs.size(); ++o)
    plan.outputs.push_back(describe_output(bound, o, planner.outputs_[o]));
  return plan;
}

Plan default_plan(const Call& call, size_t mesh_ndim) {
  Plan plan;
  plan.inputs.assign(call.tensors().size(), Placements(mesh_ndim));
  for (const c10::Argument& result : call.schema().returns()) {
    plan.outputs.push_back(
        {.placements = Placements(mesh_ndim), .list = result.type()->kind() == c10::TypeKind::ListType, .sizes = {}});
  }
  return plan;
}

namespace {

std::atomic<uint64_t> version{0};

}  // namespace

uint64_t plans_version() {
  return version.load(std::memory_order_acquire);
}

void make_plans_stale() {
  version.fetch_add(1, std::memory_order_acq_rel);
}

}  // namespace serried::spmd
