// Meshes made of the axes of a mesh: slice, flatten, unflatten, concatenate.
#include "serried/mesh/mesh.h"

#include <algorithm>
#include <set>

#include "serried/base/error.h"
#include "serried/mesh/mesh_root.h"

namespace serried {
namespace {

using detail::MeshAxis;
using detail::MeshState;

void check_named(std::string_view where, const DeviceMesh& mesh) {
  if (!mesh.dim_names().empty()) return;
  raise<c10::ValueError>(
      {where, c10::str(mesh.to_string(), " has no names"), "name its axes where it is made: {\"dp\", \"tp\"}"});
}

[[noreturn]] void raise_overlap(std::string_view where, const std::vector<MeshAxis>& axes) {
  std::string text;
  for (const MeshAxis& axis : axes) text += c10::str(text.empty() ? "" : " ", axis.name, "=", axis.size());
  raise<c10::ValueError>({where, c10::str("the axes ", text, " overlap: some rank would stand at two places"),
                          "take axes that have nothing in common"});
}

const MeshState& make(std::string_view where, const MeshState& state, std::vector<MeshAxis> axes) {
  std::set<std::string> names;
  for (const MeshAxis& axis : axes) {
    if (axis.name.empty() || names.insert(axis.name).second) continue;
    raise<c10::ValueError>(
        {where, c10::str("the name \"", axis.name, "\" is given to two axes"), "name each axis differently"});
  }
  const MeshState* made = state.root->find_or_make(axes);
  if (made == nullptr) raise_overlap(where, axes);
  return *made;
}

// Row-major over all axes.
MeshAxis merged(const std::vector<MeshAxis>& axes, const std::string& name) {
  MeshAxis result{.name = name, .steps = {0}, .coordinate = 0};
  for (const MeshAxis& axis : axes) {
    std::vector<int64_t> steps;
    for (int64_t outer : result.steps) {
      for (int64_t inner : axis.steps) steps.push_back(outer + inner);
    }
    result.steps = std::move(steps);
    result.coordinate = result.coordinate * axis.size() + axis.coordinate;
  }
  return result;
}

// The opposite; empty where the steps are no sums of one per part, as those of 2x3 are not of 3x2.
std::vector<MeshAxis> split(const MeshAxis& axis, const Sizes& sizes, const std::vector<std::string>& names) {
  std::vector<MeshAxis> parts;
  int64_t stride = axis.size();
  for (size_t i = 0; i < sizes.size(); ++i) {
    stride /= sizes[i];
    MeshAxis part{.name = names[i], .steps = {}, .coordinate = axis.coordinate / stride % sizes[i]};
    for (int64_t c = 0; c < sizes[i]; ++c) part.steps.push_back(axis.steps[size_t(c * stride)]);
    parts.push_back(std::move(part));
  }
  if (merged(parts, axis.name) != axis) return {};
  return parts;
}

bool is_within(const MeshState& part, const MeshState& whole) {
  if (&whole == &whole.root->whole()) return true;
  const std::set<int64_t> ranks(whole.ranks.begin(), whole.ranks.end());
  return std::all_of(part.ranks.begin(), part.ranks.end(), [&](int64_t rank) { return ranks.contains(rank); });
}

void check_unflatten(const DeviceMesh& mesh, int64_t axis, const Sizes& sizes, const std::vector<std::string>& names) {
  if (axis < 0 || axis >= mesh.ndim()) {
    raise<c10::ValueError>({"unflatten", c10::str("axis ", axis, " of ", mesh.to_string()),
                            c10::str("pass an axis in 0..", mesh.ndim() - 1)});
  }
  const bool wants_names = !mesh.dim_names().empty();
  if (wants_names ? names.size() != sizes.size() : !names.empty()) {
    raise<c10::ValueError>(
        {"unflatten", c10::str(sizes.size(), " sizes and ", names.size(), " names for an axis of ", mesh.to_string()),
         wants_names ? "pass one name per size" : "pass no names: the mesh has none"});
  }
  if (std::find(names.begin(), names.end(), "") != names.end()) {
    raise<c10::ValueError>({"unflatten", "an axis has an empty name", "name every axis, or none"});
  }
  int64_t product = 1;
  for (int64_t size : sizes) {
    if (size < 1 || __builtin_mul_overflow(product, size, &product)) product = 0;
  }
  if (!sizes.empty() && product == mesh.size(axis)) return;
  raise<c10::ValueError>({"unflatten",
                          c10::str("sizes ", c10::Join("x", sizes), " do not make the ", mesh.size(axis),
                                   " ranks of axis ", axis, " of ", mesh.to_string()),
                          c10::str("pass sizes whose product is ", mesh.size(axis))});
}

// The clash of a new flattened name with an axis, or with another flattened mesh of that name.
void check_flat_name(const MeshState& state, const MeshAxis& flat) {
  const auto& names = state.root->whole().names;
  const bool is_axis = std::find(names.begin(), names.end(), flat.name) != names.end();
  if (is_axis || std::find(state.names.begin(), state.names.end(), flat.name) != state.names.end()) {
    raise<c10::ValueError>(
        {"flatten", c10::str("the mesh has an axis \"", flat.name, "\" already"), "pass a name that no axis has"});
  }
  const MeshState* former = state.root->flattened(flat.name);
  if (former == nullptr || former->axes.front() == flat) return;
  raise<c10::ValueError>({"flatten",
                          c10::str("\"", flat.name, "\" is the name of another flattened mesh, of the ranks ",
                                   c10::Join(" ", former->ranks)),
                          "pass another name"});
}

}  // namespace

DeviceMesh DeviceMesh::operator[](const std::string& name) const {
  return slice({name});
}

DeviceMesh DeviceMesh::slice(const std::vector<std::string>& names) const {
  if (names.empty()) raise<c10::ValueError>({"slice", "no names were given", "pass one or more names of axes"});
  std::vector<MeshAxis> axes;
  int64_t last = -1;
  for (const std::string& name : names) {
    const bool own = std::find(state_->names.begin(), state_->names.end(), name) != state_->names.end();
    const MeshState* flat = own ? nullptr : state_->root->flattened(name);
    if (flat != nullptr && is_within(*flat, *state_)) {
      axes.push_back(flat->axes.front());
      continue;
    }
    const int64_t index = axis(name);
    if (index < last) {
      raise<c10::ValueError>({"slice",
                              c10::str("\"", c10::Join(" ", names), "\" is not the order of the axes in ", to_string()),
                              "list the names in the mesh's order: " + c10::Join(" ", state_->names)});
    }
    last = index;
    axes.push_back(state_->axes[size_t(index)]);
  }
  return DeviceMesh({state_, &make("slice", *state_, std::move(axes))});
}

DeviceMesh DeviceMesh::flatten(const std::string& name) const {
  if (name.empty()) check_named("flatten", *this);
  const MeshAxis flat = merged(state_->axes, name.empty() ? c10::Join("_", state_->names) : name);
  if (ndim() == 1 && state_->axes.front() == flat) return *this;
  check_flat_name(*state_, flat);
  const MeshState& made = make("flatten", *state_, {flat});
  state_->root->remember_flattened(flat.name, made);
  return DeviceMesh({state_, &made});
}

DeviceMesh DeviceMesh::unflatten(int64_t axis, const Sizes& sizes, const std::vector<std::string>& names) const {
  check_unflatten(*this, axis, sizes, names);
  const std::vector<std::string> given = names.empty() ? std::vector<std::string>(sizes.size()) : names;
  const std::vector<MeshAxis> parts = split(state_->axes[size_t(axis)], sizes, given);
  if (parts.empty()) {
    raise<c10::ValueError>({"unflatten",
                            c10::str("axis ", axis, " of ", to_string(), " was flattened from axes that ",
                                     c10::Join("x", sizes), " does not follow"),
                            "use the sizes it was flattened from, or factors of them"});
  }
  std::vector<MeshAxis> axes = state_->axes;
  axes.erase(axes.begin() + axis);
  axes.insert(axes.begin() + axis, parts.begin(), parts.end());
  return DeviceMesh({state_, &make("unflatten", *state_, std::move(axes))});
}

DeviceMesh DeviceMesh::concatenate(const std::vector<DeviceMesh>& meshes) {
  if (meshes.empty()) raise<c10::ValueError>({"concatenate", "no meshes were given", "pass one or more"});
  std::vector<MeshAxis> axes;
  for (const DeviceMesh& mesh : meshes) {
    if (mesh.state_->root != meshes.front().state_->root) {
      raise<c10::ValueError>({"concatenate",
                              c10::str(meshes.front().to_string(), " and ", mesh.to_string(), " are not of one root"),
                              "pass meshes that were cut from one mesh"});
    }
    axes.insert(axes.end(), mesh.state_->axes.begin(), mesh.state_->axes.end());
  }
  const bool named = !axes.front().name.empty();
  if (std::any_of(axes.begin(), axes.end(), [&](const MeshAxis& axis) { return axis.name.empty() == named; })) {
    raise<c10::ValueError>({"concatenate", "some axes have names and some have none", "name all axes, or none"});
  }
  return DeviceMesh({meshes.front().state_, &make("concatenate", *meshes.front().state_, std::move(axes))});
}

}  // namespace serried
