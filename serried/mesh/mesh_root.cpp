// Meshes of one root, kept by their axes, and their groups, kept by their ranks.
#include "serried/mesh/mesh_root.h"

#include <algorithm>
#include <atomic>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "serried/base/error.h"
#include "serried/comm/groups/named_group.h"

namespace serried::detail {
namespace {

uint64_t next_id() {
  static std::atomic<uint64_t> last{0};
  return ++last;
}

bool has_duplicates(std::vector<int64_t> ranks) {
  std::sort(ranks.begin(), ranks.end());
  return std::adjacent_find(ranks.begin(), ranks.end()) != ranks.end();
}

// Places behind `base` in the root's list, row-major over the chosen axes; the others stay at this rank's coordinate.
std::vector<int64_t> places(const std::vector<MeshAxis>& axes, int64_t base, uint64_t chosen) {
  std::vector<int64_t> result = {base};
  for (size_t axis = 0; axis < axes.size(); ++axis) {
    if ((chosen >> axis & 1U) == 0) continue;
    std::vector<int64_t> longer;
    longer.reserve(result.size() * axes[axis].steps.size());
    for (int64_t place : result) {
      for (int64_t step : axes[axis].steps) longer.push_back(place + step);
    }
    result = std::move(longer);
  }
  return result;
}

// c10d orders the ranks of a split by their number in the parent. A mesh may have any order: such a group is made on
// the parent's store by its members, each under its place in the list.
Group make_ordered(const Group& parent, const std::vector<int>& ranks) {
  const auto record = parent->hasBackends() ? find_record(*parent) : std::nullopt;  // without one it has no name
  if (!record) {
    raise<c10::ValueError>({"get_group",
                            c10::str("ranks ", c10::Join(" ", ranks),
                                     " do not ascend, and the mesh's group was not "
                                     "made by new_group"),
                            "make the mesh over a group of new_group, or with ascending ranks along every axis"});
  }
  const auto mine = std::find(ranks.begin(), ranks.end(), parent->getRank());
  const std::string prefix = c10::str("serried/mesh/", c10::Join(",", ranks));
  return new_group(record->backend, {.timeout = record->timeout,
                                     .device = record->device,
                                     .store = c10::make_intrusive<c10d::PrefixStore>(prefix, parent->getStore()),
                                     .rank = int(mine - ranks.begin()),
                                     .world_size = int(ranks.size()),
                                     .backend_options = record->options});
}

// All ranks are there and each once, so that sorted means 0, 1, ...
bool is_whole(const std::vector<int>& ranks, const Group& group) {
  return int(ranks.size()) == group->getSize() && std::is_sorted(ranks.begin(), ranks.end());
}

Group make_subgroup(const Group& parent, const std::vector<int>& ranks) {
  if (!parent) {
    raise<c10::ValueError>(
        {"get_group",
         c10::str("the mesh was made of given groups, none of which holds the ranks ", c10::Join(" ", ranks)),
         "keep a ProcessGroupGuard of the group of all ranks alive where from_groups is called"});
  }
  if (is_whole(ranks, parent)) return parent;
  if (!std::is_sorted(ranks.begin(), ranks.end())) return make_ordered(parent, ranks);
  return parent->splitGroup(ranks, std::nullopt, std::nullopt, std::nullopt, std::nullopt, std::nullopt);
}

std::vector<MeshAxis> root_axes(const MeshRootParts& parts, int64_t index) {
  std::vector<MeshAxis> axes;
  int64_t stride = int64_t(parts.ranks.size());
  for (const auto& [name, size] : parts.axes) {
    stride /= size;
    MeshAxis axis{.name = name, .steps = std::vector<int64_t>(size_t(size)), .coordinate = index / stride % size};
    for (int64_t i = 0; i < size; ++i) axis.steps[size_t(i)] = i * stride;
    axes.push_back(std::move(axis));
  }
  return axes;
}

}  // namespace

MeshRoot::MeshRoot(MeshRootParts parts) : parts_(std::move(parts)) {
  const auto mine = std::find(parts_.ranks.begin(), parts_.ranks.end(), parts_.rank);
  contains_ = mine != parts_.ranks.end();
  index_ = contains_ ? mine - parts_.ranks.begin() : 0;
  make(root_axes(parts_, index_), parts_.ranks);
}

std::vector<int64_t> MeshRoot::ranks_of(const std::vector<MeshAxis>& axes) const {
  int64_t base = index_;
  for (const MeshAxis& axis : axes) base -= axis.steps[size_t(axis.coordinate)];
  std::vector<int64_t> ranks;
  // Axes that are not at right angles to each other point outside the root.
  for (int64_t place : places(axes, base, ~uint64_t(0))) {
    if (place < 0 || place >= int64_t(parts_.ranks.size())) return {};
    ranks.push_back(parts_.ranks[size_t(place)]);
  }
  return ranks;
}

const MeshState& MeshRoot::make(std::vector<MeshAxis> axes, std::vector<int64_t> ranks) {
  MeshState state;
  state.root = this;
  state.id = next_id();
  state.axes = std::move(axes);
  for (const MeshAxis& axis : state.axes) {
    state.shape.push_back(axis.size());
    state.coordinate.push_back(axis.coordinate);
    if (!axis.name.empty()) state.names.push_back(axis.name);
  }
  state.ranks = std::move(ranks);
  return states_.emplace_back(std::move(state));
}

const MeshState* MeshRoot::find_or_make(std::vector<MeshAxis> axes) {
  const std::lock_guard lock(mutex_);
  for (const MeshState& state : states_) {
    if (state.axes == axes) return &state;
  }
  std::vector<int64_t> ranks = ranks_of(axes);
  if (ranks.empty() || has_duplicates(ranks)) return nullptr;
  return &make(std::move(axes), std::move(ranks));
}

const MeshState* MeshRoot::flattened(const std::string& name) const {
  const std::lock_guard lock(mutex_);
  const auto found = flattened_.find(name);
  return found == flattened_.end() ? nullptr : found->second;
}

void MeshRoot::remember_flattened(const std::string& name, const MeshState& state) {
  const std::lock_guard lock(mutex_);
  flattened_.emplace(name, &state);
}

// The ranks that differ from this one in `axes`.
std::vector<int> MeshRoot::members(const MeshState& state, uint64_t axes) const {
  int64_t base = index_;
  for (size_t axis = 0; axis < state.axes.size(); ++axis) {
    if ((axes >> axis & 1U) != 0) base -= state.axes[axis].steps[size_t(state.axes[axis].coordinate)];
  }
  std::vector<int> ranks;
  for (int64_t place : places(state.axes, base, axes)) ranks.push_back(int(parts_.ranks[size_t(place)]));
  return ranks;
}

std::string MeshRoot::backend_of(const MeshState& state, uint64_t axes) const {
  const std::lock_guard lock(mutex_);
  // A group that was given may have another backend than those that are made by splitting the root's.
  const auto given = groups_.find(members(state, axes));
  const Group& group = given != groups_.end() && given->second ? given->second : parts_.group;
  return group ? group->getBackendName() : "";
}

Group MeshRoot::find_or_make_group(const MeshState& state, uint64_t axes) {
  const std::lock_guard lock(mutex_);
  Group& group = state.groups[axes];
  if (group) return group;
  const std::vector<int> ranks = members(state, axes);
  Group& shared = groups_[ranks];
  if (!shared) shared = make_subgroup(parts_.group, ranks);
  return group = shared;
}

void MeshRoot::give_group(int64_t axis, const Group& group) {
  const std::lock_guard lock(mutex_);
  std::vector<int> ranks;
  const MeshAxis& along = states_.front().axes[size_t(axis)];
  const int64_t base = index_ - along.steps[size_t(along.coordinate)];
  for (int64_t step : along.steps) ranks.push_back(int(parts_.ranks[size_t(base + step)]));
  groups_[ranks] = group;
}

}  // namespace serried::detail
