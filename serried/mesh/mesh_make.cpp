// Making a mesh: checks of device type, ranks and names; nothing is sent.
#include "serried/mesh/mesh.h"

#include <algorithm>
#include <set>

#include <ATen/ops/arange.h>

#include "serried/base/error.h"
#include "serried/mesh/mesh_root.h"

namespace serried {
namespace {

using detail::MeshRoot;
using detail::MeshRootParts;

void check_device_type(std::string_view where, const std::string& device_type) {
  if (device_type == "cpu" || device_type == "cuda") return;
  const bool has_index = device_type.find(':') != std::string::npos;
  raise<c10::ValueError>({where,
                          has_index ? c10::str("device type \"", device_type, "\" has an index")
                                    : c10::str("unknown device type \"", device_type, "\""),
                          "pass \"cpu\" or \"cuda\"; which device a rank uses is its own affair"});
}

void check_names(std::string_view where, const std::vector<std::string>& names, size_t num_axes) {
  if (names.empty()) return;
  if (names.size() != num_axes) {
    raise<c10::ValueError>({where,
                            c10::str("the mesh has ", num_axes, num_axes == 1 ? " axis, but " : " axes, but ",
                                     names.size(), names.size() == 1 ? " name: " : " names: ", c10::Join(" ", names)),
                            "pass one name per axis, or none at all"});
  }
  std::set<std::string> seen;
  for (const std::string& name : names) {
    if (name.empty()) raise<c10::ValueError>({where, "an axis has an empty name", "name every axis, or none"});
    if (seen.insert(name).second) continue;
    raise<c10::ValueError>(
        {where, c10::str("the name \"", name, "\" is given to two axes"), "name each axis differently"});
  }
}

// The ranks row-major, each once and within the group.
std::vector<int64_t> checked_ranks(std::string_view where, const at::Tensor& ranks, int64_t group_size) {
  if (!ranks.defined() || !at::isIntegralType(ranks.scalar_type(), /*includeBool=*/false) || ranks.numel() == 0 ||
      ranks.dim() == 0) {
    raise<c10::ValueError>({where, "the ranks are not a tensor of integers with one dim or more and some element",
                            "pass at::arange(4).view({2, 2}), or the like"});
  }
  if (ranks.numel() > group_size) {
    raise<c10::ValueError>({where,
                            c10::str("the mesh ", c10::Join("x", ranks.sizes()), " has ", ranks.numel(),
                                     " ranks, but the group has ", group_size),
                            "use a smaller mesh, or start more ranks"});
  }
  const at::Tensor list = ranks.to(at::kCPU, at::kLong).contiguous();
  const auto* first = list.const_data_ptr<int64_t>();
  std::vector<int64_t> result(first, first + list.numel());
  std::vector<char> seen(size_t(group_size), 0);
  for (int64_t rank : result) {
    if (rank < 0 || rank >= group_size) {
      raise<c10::ValueError>(
          {where, c10::str("rank ", rank, " is not in 0..", group_size - 1), "list ranks of the mesh's group"});
    }
    if (seen[size_t(rank)]++ == 0) continue;
    raise<c10::ValueError>({where, c10::str("rank ", rank, " is listed twice"), "list each rank once"});
  }
  return result;
}

std::vector<std::pair<std::string, int64_t>> named_sizes(const std::vector<std::string>& names,
                                                         c10::IntArrayRef sizes) {
  std::vector<std::pair<std::string, int64_t>> axes;
  for (size_t i = 0; i < sizes.size(); ++i) axes.emplace_back(names.empty() ? "" : names[i], sizes[i]);
  return axes;
}

// The root owns its meshes: a handle on one keeps the root alive.
std::shared_ptr<const detail::MeshState> whole_of(const std::shared_ptr<MeshRoot>& root) {
  return {root, &root->whole()};
}

// Where this rank stands follows from its rank in each group; the root's group, if any, must say the same.
int64_t rank_in_groups(const std::vector<Group>& groups, const at::Tensor& ranks, const std::vector<int64_t>& list) {
  int64_t index = 0;
  for (size_t axis = 0; axis < groups.size(); ++axis) {
    if (!groups[axis]) {
      raise<c10::ValueError>({"from_groups", c10::str("group ", axis, " is null"), "pass one group per axis"});
    }
    if (groups[axis]->getSize() != ranks.size(int64_t(axis))) {
      raise<c10::ValueError>(
          {"from_groups",
           c10::str("group ", axis, " has ", groups[axis]->getSize(), " ranks, but axis ", axis, " of the mesh ",
                    c10::Join("x", ranks.sizes()), " has ", ranks.size(int64_t(axis))),
           "pass the groups in the order of the axes"});
    }
    index = index * ranks.size(int64_t(axis)) + groups[axis]->getRank();
  }
  return list[size_t(index)];
}

}  // namespace

DeviceMesh::DeviceMesh(const std::string& device_type, const at::Tensor& ranks, std::vector<std::string> names,
                       MeshOptions options) {
  check_device_type("DeviceMesh", device_type);
  const Group group = options.group ? options.group : require_current_process_group("DeviceMesh");
  std::vector<int64_t> list = checked_ranks("DeviceMesh", ranks, group->getSize());
  check_names("DeviceMesh", names, size_t(ranks.dim()));
  state_ = whole_of(std::make_shared<MeshRoot>(MeshRootParts{.group = group,
                                                             .device_type = device_type,
                                                             .ranks = std::move(list),
                                                             .rank = group->getRank(),
                                                             .axes = named_sizes(names, ranks.sizes())}));
}

DeviceMesh DeviceMesh::from_group(const Group& group, const std::string& device_type, const std::string& name) {
  if (!group) raise<c10::ValueError>({"from_group", "the group is null", "pass a group that holds this rank"});
  std::vector<std::string> names;
  if (!name.empty()) names.push_back(name);
  return DeviceMesh(device_type, at::arange(group->getSize()), std::move(names), {.group = group});
}

DeviceMesh DeviceMesh::from_groups(const std::vector<Group>& groups, const std::string& device_type,
                                   const at::Tensor& ranks, std::vector<std::string> names) {
  check_device_type("from_groups", device_type);
  const Group world = current_process_group();
  const int64_t most = !ranks.defined() || ranks.numel() == 0 ? 0 : ranks.max().item<int64_t>() + 1;
  std::vector<int64_t> list = checked_ranks("from_groups", ranks, world ? world->getSize() : most);
  if (groups.empty() || int64_t(groups.size()) != ranks.dim()) {
    raise<c10::ValueError>(
        {"from_groups",
         c10::str(groups.size(), " groups for the ", ranks.dim(), " axes of the mesh ", c10::Join("x", ranks.sizes())),
         "pass one group per axis"});
  }
  check_names("from_groups", names, groups.size());
  const int64_t rank = rank_in_groups(groups, ranks, list);
  if (world && world->getRank() != rank) {
    raise<c10::ValueError>({"from_groups",
                            c10::str("by its groups this is rank ", rank,
                                     " of the mesh, but in the current group it is "
                                     "rank ",
                                     world->getRank()),
                            "list the ranks of the current group in the order of the axes' groups"});
  }
  auto root = std::make_shared<MeshRoot>(MeshRootParts{.group = world,
                                                       .device_type = device_type,
                                                       .ranks = std::move(list),
                                                       .rank = rank,
                                                       .axes = named_sizes(names, ranks.sizes())});
  for (size_t axis = 0; axis < groups.size(); ++axis) root->give_group(int64_t(axis), groups[axis]);
  return DeviceMesh(whole_of(root));
}

DeviceMesh init_device_mesh(const std::string& device_type, const Sizes& shape, std::vector<std::string> names,
                            MeshOptions options) {
  check_device_type("init_device_mesh", device_type);
  if (!options.group) options.group = require_current_process_group("init_device_mesh");
  check_names("init_device_mesh", names, shape.size());
  int64_t size = 1;
  for (int64_t length : shape) {
    if (length < 1) {
      raise<c10::ValueError>({"init_device_mesh",
                              c10::str("the shape ", c10::Join("x", shape), " has an axis of ", length),
                              "pass 1 or more for every axis"});
    }
    if (__builtin_mul_overflow(size, length, &size)) size = INT64_MAX;
  }
  if (shape.empty()) {
    raise<c10::ValueError>({"init_device_mesh", "the shape has no axis", "pass {n} for a mesh of one axis"});
  }
  if (size > options.group->getSize()) {
    raise<c10::ValueError>({"init_device_mesh",
                            c10::str("the mesh ", c10::Join("x", shape), " has ", size, " ranks, but the group has ",
                                     options.group->getSize()),
                            "use a smaller mesh, or start more ranks"});
  }
  return DeviceMesh(device_type, at::arange(size).view(shape), std::move(names), options);
}

}  // namespace serried
