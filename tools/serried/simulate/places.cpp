// Classes by refinement: what has been told apart tells apart what touches it, until nothing new comes of it.
#include "tools/serried/simulate/places.h"

#include <algorithm>
#include <set>

#include "tools/serried/simulate/demand.h"

namespace serried::simulation {
namespace {

using Colour = int64_t;
using Signature = std::vector<int64_t>;

// Equal signatures get equal numbers, from 0 in the order of their first.
class Numbers {
 public:
  Colour of(Signature signature) {
    const auto [found, is_new] = known_.emplace(std::move(signature), Colour(known_.size()));
    if (is_new) signatures_.push_back(&found->first);
    return found->second;
  }
  size_t count() const { return known_.size(); }
  const Signature& signature_of(Colour colour) const { return *signatures_[size_t(colour)]; }

 private:
  std::map<Signature, Colour> known_;
  std::vector<const Signature*> signatures_;  // nodes of a map stay where they are
};

struct Touch {
  size_t other;    // group or resource
  size_t pattern;  // of the times of all steps
};

struct RawGroup {
  size_t axis = 0;
  std::vector<int64_t> ranks = {};
  std::vector<size_t> hosts = {};
  HostSizes sizes = {};
  int64_t delays = 0;                                 // pattern of its steps' delays
  std::vector<std::pair<size_t, size_t>> steps = {};  // of all calls: which call, and which of its steps
  std::vector<Touch> touches = {};
};

class Finder {
 public:
  Finder(const Job& job, const PlacesOptions& options)
      : job_(job),
        one_by_one_(options.one_by_one),
        num_ranks_(job.num_ranks()),
        num_hosts_(size_t((num_ranks_ + job.machine.ranks_per_host - 1) / job.machine.ranks_per_host)) {}

  Places run() {
    find_calls();
    make_groups();
    ask_for_resources();
    colour_at_first();
    if (!one_by_one_) refine();
    return classes();
  }

 private:
  int64_t program_of(int64_t rank) const {
    return job_.program_of_rank.empty() ? 0 : job_.program_of_rank[size_t(rank)];
  }

  int64_t ranks_beside(int64_t rank) const {
    const int64_t per_host = job_.machine.ranks_per_host;
    const int64_t begin = rank / per_host * per_host;
    return std::min(per_host, num_ranks_ - begin);
  }

  void find_calls() {
    std::set<AxisCall> calls;
    for (const Program& program : job_.programs) {
      for (const Action& action : program) {
        if (action.kind == Action::Kind::issue) calls.insert({action.axis, action.call});
      }
    }
    places_.calls.assign(calls.begin(), calls.end());
  }

  void make_groups() {
    group_of_.assign(job_.axes.size(), std::vector<size_t>(size_t(num_ranks_)));
    int64_t stride = num_ranks_;
    for (size_t axis = 0; axis < job_.axes.size(); ++axis) {
      const int64_t size = job_.axes[axis].size, outer = stride;
      stride /= size;
      for (int64_t first = 0; first < num_ranks_; ++first) {
        if (first % outer >= stride) continue;
        RawGroup group{.axis = axis};
        for (int64_t i = 0; i < size; ++i) add_rank(first + i * stride, group);
        groups_.push_back(std::move(group));
      }
    }
  }

  void add_rank(int64_t rank, RawGroup& group) {
    group_of_[group.axis][size_t(rank)] = groups_.size();
    group.ranks.push_back(rank);
    const size_t host = size_t(rank / job_.machine.ranks_per_host);
    if (group.hosts.empty() || group.hosts.back() != host) {
      group.hosts.push_back(host);
      group.sizes.push_back(0);
    }
    ++group.sizes.back();
  }

  size_t number_of(const Demand::Hold& hold) const {
    if (hold.part == Part::uplink_out) return 3 * num_hosts_ + 2 * hold.place;
    if (hold.part == Part::uplink_in) return 3 * num_hosts_ + 2 * hold.place + 1;
    return 3 * hold.place + size_t(hold.part);
  }

  Colour kind_of(size_t resource) const {
    return resource < 3 * num_hosts_ ? Colour(resource % 3) : Colour(3 + (resource - 3 * num_hosts_) % 2);
  }

  // Patterns list (step over all calls, time), without those that are 0.
  void ask_for_resources() {
    touched_by_.resize(3 * num_hosts_ + (job_.machine.uplink ? 2 * num_hosts_ : 0));
    for (size_t g = 0; g < groups_.size(); ++g) {
      RawGroup& group = groups_[g];
      std::map<size_t, Signature> asked;
      Signature delays;
      for (size_t call = 0; call < places_.calls.size(); ++call) {
        if (places_.calls[call].axis != group.axis) continue;
        size_t in_call = 0;
        for (const Demand& demand : demands_of(job_.machine, places_.calls[call].call, group.hosts, group.sizes)) {
          for (const Demand::Hold& hold : demand.holds) {
            Signature& signature = asked[number_of(hold)];
            signature.insert(signature.end(), {Colour(group.steps.size()), hold.time});
          }
          delays.insert(delays.end(), {demand.least, demand.after});
          group.steps.emplace_back(call, in_call++);
        }
      }
      group.delays = patterns_.of(std::move(delays));
      for (auto& [resource, signature] : asked) {
        const size_t pattern = size_t(patterns_.of(std::move(signature)));
        group.touches.push_back({resource, pattern});
        touched_by_[resource].push_back({g, pattern});
      }
    }
  }

  void colour_at_first() {
    Numbers ranks;
    for (int64_t rank = 0; rank < num_ranks_; ++rank) {
      rank_colours_.push_back(one_by_one_ ? rank : ranks.of({program_of(rank), ranks_beside(rank)}));
    }
    Numbers groups;
    for (size_t g = 0; g < groups_.size(); ++g) {
      group_colours_.push_back(one_by_one_ ? Colour(g) : groups.of({Colour(groups_[g].axis), groups_[g].delays}));
    }
    for (size_t r = 0; r < touched_by_.size(); ++r) resource_colours_.push_back(one_by_one_ ? Colour(r) : kind_of(r));
  }

  void refine() {
    for (size_t before = 0;;) {
      const size_t now = refine_resources() + refine_groups() + refine_ranks();
      if (now == before) return;
      before = now;
    }
  }

  size_t refine_resources() {
    Numbers numbers;
    for (size_t r = 0; r < touched_by_.size(); ++r) {
      std::vector<std::pair<Colour, Colour>> touches;
      for (const Touch& touch : touched_by_[r]) touches.emplace_back(group_colours_[touch.other], touch.pattern);
      std::sort(touches.begin(), touches.end());
      Signature signature{resource_colours_[r]};
      for (const auto& [group, pattern] : touches) signature.insert(signature.end(), {group, pattern});
      resource_colours_[r] = numbers.of(std::move(signature));
    }
    return numbers.count();
  }

  // A group starts with its last rank and ends with its last resource: how many there are of a class is the same to it.
  size_t refine_groups() {
    Numbers numbers;
    for (size_t g = 0; g < groups_.size(); ++g) {
      std::set<std::pair<Colour, Colour>> touches;
      for (const Touch& touch : groups_[g].touches) touches.emplace(resource_colours_[touch.other], touch.pattern);
      std::set<Colour> ranks;
      for (const int64_t rank : groups_[g].ranks) ranks.insert(rank_colours_[size_t(rank)]);
      Signature signature{group_colours_[g], Colour(touches.size())};
      for (const auto& [resource, pattern] : touches) signature.insert(signature.end(), {resource, pattern});
      signature.insert(signature.end(), ranks.begin(), ranks.end());
      group_colours_[g] = numbers.of(std::move(signature));
    }
    return numbers.count();
  }

  size_t refine_ranks() {
    Numbers numbers;
    for (size_t rank = 0; rank < size_t(num_ranks_); ++rank) {
      Signature signature{rank_colours_[rank]};
      for (const auto& groups : group_of_) signature.push_back(group_colours_[groups[rank]]);
      rank_colours_[rank] = numbers.of(std::move(signature));
    }
    return numbers.count();
  }

  Places classes() {
    places_.ranks.resize(num_classes(rank_colours_));
    places_.groups.resize(num_classes(group_colours_));
    places_.resources.resize(num_classes(resource_colours_));
    for (int64_t rank = 0; rank < num_ranks_; ++rank) describe_rank(rank);
    for (size_t g = 0; g < groups_.size(); ++g) describe_group(g);
    for (size_t r = 0; r < touched_by_.size(); ++r) describe_resource(r);
    return std::move(places_);
  }

  static size_t num_classes(const std::vector<Colour>& colours) {
    return colours.empty() ? 0 : size_t(*std::max_element(colours.begin(), colours.end())) + 1;
  }

  void describe_rank(int64_t rank) {
    RankClass& described = places_.ranks[size_t(rank_colours_[size_t(rank)])];
    if (described.count++ > 0) return;
    described.first = rank;
    described.program = size_t(program_of(rank));
    const int64_t beside = ranks_beside(rank), cores = job_.machine.cores();
    if (beside > cores) described.slowdown_of = beside, described.slowdown_by = cores;
    for (const auto& groups : group_of_) {
      described.group_of_axis.push_back(size_t(group_colours_[groups[size_t(rank)]]));
    }
  }

  void describe_group(size_t g) {
    const RawGroup& group = groups_[g];
    GroupClass& described = places_.groups[size_t(group_colours_[g])];
    if (described.count++ > 0) return;
    described.axis = group.axis;
    std::set<size_t> ranks;
    for (const int64_t rank : group.ranks) ranks.insert(size_t(rank_colours_[size_t(rank)]));
    described.ranks.assign(ranks.begin(), ranks.end());
    described.steps.resize(places_.calls.size());
    for (size_t call = 0; call < places_.calls.size(); ++call) {
      if (places_.calls[call].axis != group.axis) continue;
      for (const Demand& demand : demands_of(job_.machine, places_.calls[call].call, group.hosts, group.sizes)) {
        StepDemand step{.least = demand.least, .after = demand.after};
        std::set<std::pair<size_t, Time>> holds;  // resources of one class may be asked for different times
        for (const Demand::Hold& hold : demand.holds) {
          holds.emplace(size_t(resource_colours_[number_of(hold)]), hold.time);
        }
        for (const auto& [resource, time] : holds) step.holds.push_back({resource, time});
        described.steps[call].push_back(std::move(step));
      }
    }
  }

  void describe_resource(size_t r) {
    ResourceClass& described = places_.resources[size_t(resource_colours_[r])];
    if (described.count++ > 0) return;
    for (const Touch& touch : touched_by_[r]) {
      const Signature& asked = patterns_.signature_of(Colour(touch.pattern));  // (step, time) pairs
      for (size_t i = 0; i < asked.size(); i += 2) {
        const auto [call, step] = groups_[touch.other].steps[size_t(asked[i])];
        std::vector<Time>& load = described.load[{size_t(group_colours_[touch.other]), call}];
        load.resize(std::max(load.size(), step + 1));
        load[step] = sum_of(load[step], asked[i + 1]);
      }
    }
  }

  const Job& job_;
  const bool one_by_one_;
  const int64_t num_ranks_;
  const size_t num_hosts_;
  Places places_;
  std::vector<RawGroup> groups_;
  std::vector<std::vector<size_t>> group_of_;   // by axis and rank
  std::vector<std::vector<Touch>> touched_by_;  // by resource
  Numbers patterns_;
  std::vector<Colour> rank_colours_, group_colours_, resource_colours_;
};

}  // namespace

Places find_places(const Job& job, const PlacesOptions& options) {
  return Finder(job, options).run();
}

}  // namespace serried::simulation
