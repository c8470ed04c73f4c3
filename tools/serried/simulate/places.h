// Ranks, groups and what they share, each as a class of those that nothing tells apart.
#pragma once

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "tools/serried/simulate/job.h"

namespace serried::simulation {

/// What one step of a call asks of a class of groups.
struct StepDemand {
  struct Hold {
    size_t resource;  // a class of them
    Time each;        // by one group of the class
  };
  std::vector<Hold> holds = {};
  Time least = 0;  // from its start, though nothing else runs
  Time after = 0;  // from when the last resource is free
};

/// The distinct calls that a job makes on an axis.
struct AxisCall {
  size_t axis = 0;
  Call call = {};
  auto operator<=>(const AxisCall&) const = default;
};

struct RankClass {
  int64_t count = 0;
  int64_t first = 0;  // rank
  size_t program = 0;
  Time slowdown_of = 1, slowdown_by = 1;  // computing takes of/by as long: more ranks than cores
  std::vector<size_t> group_of_axis = {};
};

struct GroupClass {
  size_t axis = 0;
  int64_t count = 0;
  std::vector<size_t> ranks = {};                   // classes, each once
  std::vector<std::vector<StepDemand>> steps = {};  // by call of the job
};

struct ResourceClass {
  int64_t count = 0;
  /// By class of groups and call, for each step: what all groups of the class ask for.
  std::map<std::pair<size_t, size_t>, std::vector<Time>> load = {};
};

struct Places {
  std::vector<AxisCall> calls;
  std::vector<RankClass> ranks;
  std::vector<GroupClass> groups;
  std::vector<ResourceClass> resources;
};

struct PlacesOptions {
  bool one_by_one = false;  // every rank, group and resource is a class of its own
};

/// Ranks that do the same at places that are the same, as seen from every group and every resource they share, are one
/// class: what happens to one happens to all of them at the same time.
Places find_places(const Job& job, const PlacesOptions& options = {});

}  // namespace serried::simulation
