// Discrete events, one wave of them after another: what happens at one moment is looked at together, so that the order
// of equals decides nothing.
#include "tools/serried/simulate/simulate.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <optional>

#include "serried/base/text.h"
#include "tools/serried/simulate/demand.h"

namespace serried::simulation {
namespace {

struct RankState {
  size_t next = 0;  // action
  struct Issued {
    size_t group = 0;
    size_t sequence = 0;
  };
  std::vector<Issued> issued = {};
  std::vector<size_t> issued_on = {};  // by axis: how many
  bool waits = false;
  Time since = 0;
  Time computed = 0;
  Time end = 0;
  bool done = false;
};

struct GroupState {
  struct Sequence {
    size_t call = 0;
    size_t arrived = 0;  // classes of ranks
    Time begin = 0;
    std::optional<Time> end = {};
  };
  std::vector<Sequence> sequences = {};
  size_t running = 0;  // the next one that may start, or runs
  bool runs = false;
  bool is_in_step = false;
  size_t step = 0;
};

class Engine {
 public:
  Engine(const Job& job, const PlacesOptions& options) : job_(job) {
    check(job);
    result_.places = find_places(job, options);
    ranks_.resize(places().ranks.size());
    groups_.resize(places().groups.size());
    free_at_.resize(places().resources.size());
    for (size_t i = 0; i < places().calls.size(); ++i) number_of_call_[places().calls[i]] = i;
    for (RankState& rank : ranks_) rank.issued_on.resize(job.axes.size());
    result_.calls.resize(places().calls.size());
    for (size_t i = 0; i < places().calls.size(); ++i) result_.calls[i].call = places().calls[i];
  }

  Simulation run() {
    for (size_t rank = 0; rank < ranks_.size(); ++rank) rank_events_[0].push_back(rank);
    while (!rank_events_.empty() || !group_events_.empty()) wave();
    for (size_t rank = 0; rank < ranks_.size(); ++rank) {
      if (!ranks_[rank].done) raise_stuck(rank);
      result_.step = std::max(result_.step, ranks_[rank].end);
      result_.compute = std::max(result_.compute, ranks_[rank].computed);
      result_.ends.push_back(ranks_[rank].end);
    }
    describe_alone();
    return std::move(result_);
  }

 private:
  const Places& places() const { return result_.places; }
  bool is_first(size_t rank) const { return places().ranks[rank].first == 0; }

  void wave() {
    Time now = std::numeric_limits<Time>::max();
    if (!rank_events_.empty()) now = rank_events_.begin()->first;
    if (!group_events_.empty()) now = std::min(now, group_events_.begin()->first);
    const std::vector<size_t> ended = taken(group_events_, now), ready = taken(rank_events_, now);
    for (const size_t group : ended) end_step(group, now);
    for (const size_t rank : ready) advance(rank, now);
    start_steps(now);
  }

  static std::vector<size_t> taken(std::map<Time, std::vector<size_t>>& events, Time now) {
    const auto found = events.find(now);
    if (found == events.end()) return {};
    std::vector<size_t> all = std::move(found->second);
    events.erase(found);
    return all;
  }

  void advance(size_t number, Time now) {
    RankState& rank = ranks_[number];
    const Program& program = job_.programs[places().ranks[number].program];
    if (rank.waits) end_wait(number, program[rank.next++], now);
    for (; rank.next < program.size(); ++rank.next) {
      const Action& action = program[rank.next];
      switch (action.kind) {
        case Action::Kind::compute:
          if (action.time == 0) break;
          compute(number, action.time, now);
          ++rank.next;
          return;
        case Action::Kind::issue: issue(number, action); break;
        case Action::Kind::wait:
          if (has_ended(rank.issued[action.issued])) break;
          rank.waits = true;
          rank.since = now;
          return;
      }
    }
    rank.done = true;
    rank.end = now;
  }

  void compute(size_t number, Time time, Time now) {
    const RankClass& place = places().ranks[number];
    const Time taken = product_of(time, place.slowdown_of) / place.slowdown_by;
    ranks_[number].computed = sum_of(ranks_[number].computed, taken);
    const Time end = sum_of(now, taken);
    rank_events_[end].push_back(number);
    if (!is_first(number)) return;
    std::vector<Span>& spans = result_.spans;
    const bool goes_on = !spans.empty() && spans.back().row == "compute" && spans.back().end == now;
    if (goes_on)
      spans.back().end = end;
    else
      spans.push_back({"compute", "compute", now, end});
  }

  void end_wait(size_t number, const Action& action, Time now) {
    RankState& rank = ranks_[number];
    rank.waits = false;
    if (!is_first(number)) return;
    const RankState::Issued issued = rank.issued[action.issued];
    CallUse& use = result_.calls[groups_[issued.group].sequences[issued.sequence].call];
    use.waited = sum_of(use.waited, now - rank.since);
  }

  bool has_ended(RankState::Issued issued) const {
    return groups_[issued.group].sequences[issued.sequence].end.has_value();
  }

  void issue(size_t number, const Action& action) {
    RankState& rank = ranks_[number];
    const size_t group = places().ranks[number].group_of_axis[action.axis];
    const size_t sequence = rank.issued_on[action.axis]++;
    const size_t call = number_of_call_.at({action.axis, action.call});
    std::vector<GroupState::Sequence>& sequences = groups_[group].sequences;
    if (sequence == sequences.size()) sequences.push_back({.call = call});
    if (sequences[sequence].call != call) raise_mismatch(sequences[sequence].call, call, action.axis);
    ++sequences[sequence].arrived;
    rank.issued.push_back({group, sequence});
    may_start_.push_back(group);
  }

  void end_step(size_t number, Time now) {
    GroupState& group = groups_[number];
    GroupState::Sequence& sequence = group.sequences[group.running];
    const std::vector<StepDemand>& steps = places().groups[number].steps[sequence.call];
    may_start_.push_back(number);
    group.is_in_step = false;
    if (++group.step < steps.size()) return;
    sequence.end = now;
    note_end(number, sequence);
    group.runs = false;
    group.step = 0;
    ++group.running;
    for (const size_t rank : places().groups[number].ranks) {
      const RankState& state = ranks_[rank];
      if (!state.waits) continue;
      const Action& action = job_.programs[places().ranks[rank].program][state.next];
      const RankState::Issued issued = state.issued[action.issued];
      if (issued.group == number && has_ended(issued) && *groups_[number].sequences[issued.sequence].end == now) {
        rank_events_[now].push_back(rank);
      }
    }
  }

  void note_end(size_t number, const GroupState::Sequence& sequence) {
    const std::vector<size_t>& ranks = places().groups[number].ranks;
    if (std::none_of(ranks.begin(), ranks.end(), [&](size_t rank) { return is_first(rank); })) return;
    CallUse& use = result_.calls[sequence.call];
    ++use.count;
    use.taken = sum_of(use.taken, *sequence.end - sequence.begin);
    const AxisCall& call = use.call;
    result_.spans.push_back({std::string(name_of(call.call.kind)) + " " + detail::bytes_text(call.call.bytes),
                             job_.axes[call.axis].name, sequence.begin, *sequence.end});
  }

  // All steps that start at this moment, then what they wait for.
  void start_steps(Time now) {
    std::sort(may_start_.begin(), may_start_.end());
    may_start_.erase(std::unique(may_start_.begin(), may_start_.end()), may_start_.end());
    std::vector<size_t> starting;
    for (const size_t number : may_start_) {
      if (may_start(number)) starting.push_back(number);
    }
    may_start_.clear();
    std::map<size_t, Time> load;
    for (const size_t number : starting) {
      GroupState& group = groups_[number];
      GroupState::Sequence& sequence = group.sequences[group.running];
      if (!group.runs) group.runs = true, sequence.begin = now;
      group.is_in_step = true;
      for (const StepDemand::Hold& hold : step_of(number).holds) load.emplace(hold.resource, 0);
    }
    for (auto& [resource, time] : load) {
      for (const size_t number : starting) time = sum_of(time, load_of(resource, number));
      free_at_[resource] = sum_of(std::max(free_at_[resource], now), time);
    }
    for (const size_t number : starting) group_events_[end_of(number, now)].push_back(number);
  }

  bool may_start(size_t number) const {
    const GroupState& group = groups_[number];
    if (group.runs) return !group.is_in_step;
    return group.running < group.sequences.size() &&
           group.sequences[group.running].arrived == places().groups[number].ranks.size();
  }

  const StepDemand& step_of(size_t number) const {
    const GroupState& group = groups_[number];
    return places().groups[number].steps[group.sequences[group.running].call][group.step];
  }

  Time load_of(size_t resource, size_t number) const {
    const GroupState& group = groups_[number];
    const auto& load = places().resources[resource].load;
    const auto found = load.find({number, group.sequences[group.running].call});
    return found == load.end() || group.step >= found->second.size() ? 0 : found->second[group.step];
  }

  Time end_of(size_t number, Time now) const {
    const StepDemand& step = step_of(number);
    Time end = sum_of(now, step.least);
    for (const StepDemand::Hold& hold : step.holds) end = std::max(end, sum_of(free_at_[hold.resource], step.after));
    return end;
  }

  void describe_alone() {
    for (size_t i = 0; i < result_.calls.size(); ++i) {
      for (const GroupClass& group : places().groups) {
        for (const StepDemand& step : group.steps[i]) {
          Time held = 0;
          for (const StepDemand::Hold& hold : step.holds) held = std::max(held, hold.each);
          Time& alone = result_.calls[i].alone;
          alone = sum_of(alone, std::max(step.least, sum_of(held, step.after)));
        }
        if (!group.steps[i].empty()) break;
      }
    }
    std::erase_if(result_.calls, [](const CallUse& use) { return use.count == 0; });
  }

  std::string text_of(const AxisCall& call) const {
    return std::string(name_of(call.call.kind)) + " of " + std::to_string(call.call.bytes) + " bytes";
  }

  [[noreturn]] void raise_mismatch(size_t call, size_t other, size_t axis) const {
    throw SimulationError("ranks of a group along \"" + job_.axes[axis].name +
                              "\" call different collectives: " + text_of(places().calls[std::min(call, other)]) +
                              " and " + text_of(places().calls[std::max(call, other)]),
                          "let the programs of a group's ranks issue the same calls in the same order");
  }

  [[noreturn]] void raise_stuck(size_t number) const {
    const RankState& rank = ranks_[number];
    const Action& action = job_.programs[places().ranks[number].program][rank.next];
    const RankState::Issued issued = rank.issued[action.issued];
    const AxisCall& call = places().calls[groups_[issued.group].sequences[issued.sequence].call];
    throw SimulationError("rank " + std::to_string(places().ranks[number].first) + " waits for ever for " +
                              text_of(call) + " along \"" + job_.axes[call.axis].name +
                              "\", which not all ranks of its group issue",
                          "let the programs of a group's ranks issue the same calls in the same order");
  }

  const Job& job_;
  Simulation result_;
  std::vector<RankState> ranks_;
  std::vector<GroupState> groups_;
  std::vector<Time> free_at_;  // by class of resources
  std::map<AxisCall, size_t> number_of_call_;
  std::map<Time, std::vector<size_t>> rank_events_, group_events_;
  std::vector<size_t> may_start_;
};

}  // namespace

Simulation simulate(const Job& job, const PlacesOptions& options) {
  return Engine(job, options).run();
}

double expected_maximum(int64_t count) {
  if (count < 2) return 0;
  // The integral of x over the density of the largest: n * phi(x) * Phi(x)^(n - 1).
  constexpr double kFrom = -10, kTo = 10;
  constexpr int kSteps = 20000;
  const double width = (kTo - kFrom) / kSteps;
  double sum = 0;
  for (int i = 0; i < kSteps; ++i) {
    const double x = kFrom + (i + 0.5) * width;
    const double below = 0.5 * std::erfc(-x / std::sqrt(2.0));
    const double density = std::exp(-x * x / 2) / std::sqrt(2 * M_PI);
    if (below > 0) sum += x * density * double(count) * std::exp(double(count - 1) * std::log(below)) * width;
  }
  return sum;
}

Time jitter_of(const Job& job, const Simulation& simulation) {
  const double sigma = job.machine.jitter_sigma * double(simulation.compute) / double(kPerNanosecond);
  return time_of_ns(sigma * expected_maximum(job.num_ranks()));
}

}  // namespace serried::simulation
