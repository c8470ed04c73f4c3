// DeviceMesh: ranks in an n-dimensional grid with named axes; a value.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "serried/comm/groups/group.h"
#include "serried/mesh/layout.h"

namespace serried {

namespace detail {
struct MeshState;
}

struct MeshOptions {
  Group group = {};  // null: the current process group
};

/// Ranks of a group in a grid. Copies are cheap and equal; sub-meshes share their root's groups. Making one
/// communicates nothing: the group of an axis is made when it is first asked for, by its own ranks only.
class DeviceMesh {
 public:
  /// Ranks of `options.group` in the order of the int64 tensor `ranks`; each at most once.
  DeviceMesh(const std::string& device_type, const at::Tensor& ranks, std::vector<std::string> names = {},
             MeshOptions options = {});

  /// A mesh of one axis over all ranks of `group`, or of several axes whose groups exist already.
  static DeviceMesh from_group(const Group& group, const std::string& device_type = "cpu",
                               const std::string& name = "");
  static DeviceMesh from_groups(const std::vector<Group>& groups, const std::string& device_type,
                                const at::Tensor& ranks, std::vector<std::string> names);

  int64_t ndim() const;
  int64_t size() const;
  int64_t size(int64_t axis) const;
  const Sizes& shape() const;
  const std::vector<std::string>& dim_names() const;  // empty where axes have no names
  const std::string& device_type() const;
  at::Tensor ranks() const;                       // int64, of the mesh's shape; ranks of the root's group
  const std::vector<int64_t>& rank_list() const;  // the same, row-major

  /// The axis called `name`, counted from the front; ValueError that lists the names.
  int64_t axis(const std::string& name) const;

  /// The sub-mesh along one axis, or several in order, that holds this rank.
  DeviceMesh operator[](const std::string& name) const;
  DeviceMesh slice(const std::vector<std::string>& names) const;
  /// All axes as one, under a new name; found again by `mesh[name]`. Without a name: the axes' names joined by "_".
  DeviceMesh flatten(const std::string& name = "") const;
  /// One axis as several.
  DeviceMesh unflatten(int64_t axis, const Sizes& sizes, const std::vector<std::string>& names) const;
  /// Axes of several meshes of one root side by side.
  static DeviceMesh concatenate(const std::vector<DeviceMesh>& meshes);

  /// The ranks that differ from this one in that axis only, in its order. Made on first use by those ranks alone.
  Group get_group(int64_t axis) const;
  Group get_group(const std::string& name) const;
  Group get_group() const;  // of a mesh with one axis
  std::vector<Group> get_all_groups() const;
  /// The ranks that differ in any of `axes` (ascending), row-major: one collective instead of several.
  Group get_merged_group(c10::IntArrayRef axes) const;
  /// The backend of the group of an axis, whether that is made already or not; "" where nobody can tell.
  std::string backend(int64_t axis) const;
  /// The group the mesh was made over.
  const Group& root_group() const;

  int64_t get_rank() const;  // in the root's group
  int64_t get_local_rank(const std::string& name) const;
  int64_t get_local_rank(int64_t axis) const;
  int64_t get_local_rank() const;                              // of a mesh with one axis
  std::optional<std::vector<int64_t>> get_coordinate() const;  // none outside the mesh
  bool contains_this_rank() const;

  /// Mesh shape and this rank's coordinate, for layout arithmetic; all zero coordinates outside the mesh.
  Position position() const;

  /// Same ranks, shape, names and root group.
  bool operator==(const DeviceMesh& other) const;
  /// Never two alive meshes with the same number, unless equal and made from each other: cheap to compare and hash.
  uint64_t id() const;

  /// "mesh dp=2 tp=4"
  std::string to_string() const;

 private:
  explicit DeviceMesh(std::shared_ptr<const detail::MeshState> state) : state_(std::move(state)) {}
  std::shared_ptr<const detail::MeshState> state_;
};

std::ostream& operator<<(std::ostream& out, const DeviceMesh& mesh);

/// Ranks 0, 1, ... of the group, row-major in `shape`, which may leave ranks out but not have more than the group.
///     auto mesh = init_device_mesh("cpu", {2, 2}, {"dp", "tp"});
DeviceMesh init_device_mesh(const std::string& device_type, const Sizes& shape, std::vector<std::string> names = {},
                            MeshOptions options = {});

/// Makes `mesh` this thread's current mesh while alive; nests.
class MeshGuard {
 public:
  explicit MeshGuard(const DeviceMesh& mesh);
  ~MeshGuard();
  MeshGuard(const MeshGuard&) = delete;
  MeshGuard& operator=(const MeshGuard&) = delete;

 private:
  std::optional<DeviceMesh> previous_;
};

/// None where no MeshGuard is alive.
std::optional<DeviceMesh> current_mesh();

}  // namespace serried
