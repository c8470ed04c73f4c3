// Every rank goes as far as it can, over and over, until all are done or none can go on.
#include "serried/parallel/pipeline/simulate.h"

#include <algorithm>
#include <cmath>
#include <optional>

#include "serried/base/error.h"

namespace serried {
namespace {

using Kind = PipelineAction::Kind;

double cost_of(const PipelineAction& action, const PipelineCosts& costs) {
  if (costs.of) return costs.of(action);
  switch (action.kind) {
    case Kind::F: return costs.forward;
    case Kind::B: return costs.backward;
    case Kind::I: return costs.input;
    case Kind::W: return costs.weight;
    case Kind::unshard: return costs.unshard;
    case Kind::reshard: return costs.reshard;
    case Kind::reduce: return costs.reduce;
  }
  return 0;
}

double checked_cost(double cost, const std::string& of_what) {
  if (cost >= 0 && std::isfinite(cost)) return cost;
  raise<c10::ValueError>(
      {"simulate", "the cost of " + of_what + " is " + std::to_string(cost), "costs are times: 0 or more, and finite"});
}

// The simulated ranks: how far each is, and what is done since when.
class SimulatedRanks {
 public:
  SimulatedRanks(const PipelineTable& table, const PipelineCosts& costs)
      : table_(table),
        costs_(costs),
        message_(checked_cost(costs.message, "a message")),
        forward_ends_(size_t(table.stages() * table.microbatches()), kNotYet),
        backward_ends_(forward_ends_),
        next_(table.rows().size()) {
    spans_.resize(table.rows().size());
  }

  // Spans of all actions. ValueError if some can never begin.
  std::vector<std::vector<PipelineSimulation::Span>> run() {
    for (bool moved = true; moved;) {
      moved = false;
      for (size_t rank = 0; rank < next_.size(); ++rank) {
        while (!is_done(rank) && try_next(rank)) moved = true;
      }
    }
    for (size_t rank = 0; rank < next_.size(); ++rank) {
      if (!is_done(rank)) refuse_cycle(rank);
    }
    return std::move(spans_);
  }

 private:
  static constexpr double kNotYet = -1;

  bool is_done(size_t rank) const { return next_[rank] == table_.rows()[rank].size(); }
  const PipelineAction& head(size_t rank) const { return table_.rows()[rank][next_[rank]]; }
  size_t index(const PipelineAction& action) const {
    return size_t(action.stage * table_.microbatches() + action.microbatch);
  }

  // When `needed` ended. Kind I stands for whichever of B and I the table has.
  double end_of(const PipelineAction& needed) const {
    return (needed.kind == Kind::F ? forward_ends_ : backward_ends_)[index(needed)];
  }

  // What `action` needs from actions of its own stage and of the neighbours; at most two.
  std::vector<PipelineAction> needs(const PipelineAction& action) const {
    const auto [kind, stage, microbatch] = action;
    switch (kind) {
      case Kind::F:
        if (stage == 0) return {};
        return {{Kind::F, stage - 1, microbatch}};
      case Kind::B:
      case Kind::I:
        if (stage + 1 == table_.stages()) return {{Kind::F, stage, microbatch}};
        return {{Kind::F, stage, microbatch}, {Kind::I, stage + 1, microbatch}};
      case Kind::W: return {{Kind::I, stage, microbatch}};
      default: return {};
    }
  }

  bool try_next(size_t rank) {
    const PipelineAction action = head(rank);
    double begin = spans_[rank].empty() ? 0 : spans_[rank].back().end;
    for (const PipelineAction& needed : needs(action)) {
      const double end = end_of(needed);
      if (end == kNotYet) return false;
      const bool is_message = table_.rank_of(needed.stage) != int64_t(rank);
      begin = std::max(begin, end + (is_message ? message_ : 0));
    }
    const double end = begin + checked_cost(cost_of(action, costs_), to_string(action));
    spans_[rank].push_back({begin, end});
    if (action.kind == Kind::F) forward_ends_[index(action)] = end;
    if (action.kind == Kind::B || action.kind == Kind::I) backward_ends_[index(action)] = end;
    ++next_[rank];
    return true;
  }

  // What the next action of `rank`, which is stuck, waits for, as the table has it.
  PipelineAction awaited(size_t rank) const {
    for (PipelineAction needed : needs(head(rank))) {
      if (end_of(needed) != kNotYet) continue;
      const PipelineTable::Row& row = table_.rows()[size_t(table_.rank_of(needed.stage))];
      if (std::find(row.begin(), row.end(), needed) == row.end()) needed.kind = Kind::B;
      return needed;
    }
    return {};
  }

  // Each stuck rank waits for an action of a stuck rank, so that to follow them ends in a cycle.
  std::vector<size_t> cycle_from(size_t rank) const {
    std::vector<size_t> path;
    while (std::find(path.begin(), path.end(), rank) == path.end()) {
      path.push_back(rank);
      rank = size_t(table_.rank_of(awaited(rank).stage));
    }
    path.erase(path.begin(), std::find(path.begin(), path.end(), rank));
    std::rotate(path.begin(), std::min_element(path.begin(), path.end()), path.end());
    return path;
  }

  [[noreturn]] void refuse_cycle(size_t stuck_rank) const {
    const std::vector<size_t> cycle = cycle_from(stuck_rank);
    std::string text = "the table waits for ever: rank " + std::to_string(cycle[0]);
    for (size_t i = 0; i < cycle.size(); ++i) {
      const PipelineAction needed = awaited(cycle[i]);
      text += (i == 0 ? " waits at " : ", which waits at ") + to_string(head(cycle[i])) + " for ";
      if (cycle.size() == 1)
        text += "its own " + to_string(needed) + ", which comes later";
      else
        text += "rank " + std::to_string(table_.rank_of(needed.stage)) + " (" + to_string(needed) + ")";
    }
    raise<c10::ValueError>({"simulate", text, "move what is waited for to an earlier place in its row"});
  }

  const PipelineTable& table_;
  const PipelineCosts& costs_;
  double message_;
  std::vector<double> forward_ends_;
  std::vector<double> backward_ends_;
  std::vector<size_t> next_;
  std::vector<std::vector<PipelineSimulation::Span>> spans_;
};

int64_t peak_of(const PipelineTable::Row& row) {
  int64_t in_flight = 0;
  int64_t peak = 0;
  for (const PipelineAction& action : row) {
    if (action.kind == Kind::F) peak = std::max(peak, ++in_flight);
    // After I the inputs of the weights' gradients are still there.
    if (action.kind == Kind::B || action.kind == Kind::W) --in_flight;
  }
  return peak;
}

}  // namespace

PipelineSimulation simulate(const PipelineTable& table, const PipelineCosts& costs) {
  PipelineSimulation result;
  result.spans = SimulatedRanks(table, costs).run();
  double busy = 0;
  for (const auto& row : result.spans) {
    for (const PipelineSimulation::Span& span : row) busy += span.end - span.begin;
    result.makespan = std::max(result.makespan, row.back().end);
  }
  for (const PipelineTable::Row& row : table.rows()) result.peak_in_flight.push_back(peak_of(row));
  if (result.makespan > 0) result.bubble = std::max(0.0, 1 - busy / (result.makespan * double(table.ranks())));
  return result;
}

}  // namespace serried
