// What all meshes cut from one mesh share: its ranks, its groups and the meshes themselves.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "serried/comm/groups/group.h"
#include "serried/mesh/layout.h"

namespace serried::detail {

class MeshRoot;

/// One axis: the coordinate c is steps[c] places behind coordinate 0 in the root's list of ranks. A flattened axis need
/// not have equal steps.
struct MeshAxis {
  std::string name;
  std::vector<int64_t> steps;
  int64_t coordinate = 0;  // of this rank; 0 outside the mesh

  int64_t size() const { return int64_t(steps.size()); }
  bool operator==(const MeshAxis&) const = default;
};

/// One mesh. Immutable but for the groups, which the root guards.
struct MeshState {
  MeshRoot* root = nullptr;
  uint64_t id = 0;
  std::vector<MeshAxis> axes;
  // The rest follows from the axes.
  Sizes shape;
  std::vector<std::string> names;  // empty where axes have none
  std::vector<int64_t> coordinate;
  std::vector<int64_t> ranks;                // row-major
  mutable std::map<uint64_t, Group> groups;  // by the set of axes they span
};

/// What a root is made of.
struct MeshRootParts {
  Group group;  // null: only the groups that were given exist
  std::string device_type;
  std::vector<int64_t> ranks;
  int64_t rank = 0;                                   // this one's number
  std::vector<std::pair<std::string, int64_t>> axes;  // name and size
};

/// One rank's view: rank threads never share a root, but a rank's own threads (autograd's) do.
class MeshRoot {
 public:
  explicit MeshRoot(MeshRootParts parts);
  MeshRoot(const MeshRoot&) = delete;
  MeshRoot& operator=(const MeshRoot&) = delete;

  const Group& group() const { return parts_.group; }
  const std::string& device_type() const { return parts_.device_type; }
  int64_t rank() const { return parts_.rank; }
  bool contains_this_rank() const { return contains_; }
  const MeshState& whole() const { return states_.front(); }

  /// The mesh with these axes: always the same one, with the same id. Null where two coordinates would be one rank.
  const MeshState* find_or_make(std::vector<MeshAxis> axes);

  /// A mesh that `flatten` made under `name`; null where there is none.
  const MeshState* flattened(const std::string& name) const;
  void remember_flattened(const std::string& name, const MeshState& state);

  /// The group of the ranks that differ from this one in the axes whose bits are set, row-major. Made on first use;
  /// its members call it, nobody else has to.
  Group find_or_make_group(const MeshState& state, uint64_t axes);

  /// The backend that this group has or would have; "" where it could not be made.
  std::string backend_of(const MeshState& state, uint64_t axes) const;

  /// A group that exists already, as that of one axis of the whole mesh.
  void give_group(int64_t axis, const Group& group);

 private:
  const MeshState& make(std::vector<MeshAxis> axes, std::vector<int64_t> ranks);
  std::vector<int64_t> ranks_of(const std::vector<MeshAxis>& axes) const;
  std::vector<int> members(const MeshState& state, uint64_t axes) const;

  const MeshRootParts parts_;
  bool contains_ = false;
  int64_t index_ = 0;  // of this rank in parts_.ranks; 0 outside

  mutable std::mutex mutex_;
  std::deque<MeshState> states_;  // they live as long as the root: as many as there are different ones
  std::map<std::string, const MeshState*> flattened_;
  std::map<std::vector<int>, Group> groups_;  // by members in order: meshes of one root share them
};

}  // namespace serried::detail
