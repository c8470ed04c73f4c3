// DeviceMesh: what a mesh knows about itself and this rank, its groups, and the current mesh.
#include "serried/mesh/mesh.h"

#include <algorithm>
#include <cstring>
#include <ostream>

#include <ATen/ops/empty.h>

#include "serried/base/error.h"
#include "serried/mesh/current_mesh.h"
#include "serried/mesh/mesh_root.h"
#include "serried/tape/recorder.h"

namespace serried {
namespace {

size_t checked_axis(std::string_view where, const DeviceMesh& mesh, int64_t axis) {
  if (axis >= 0 && axis < mesh.ndim()) return size_t(axis);
  raise<c10::IndexError>(
      {where, c10::str("axis ", axis, " of ", mesh.to_string()), c10::str("pass an axis in 0..", mesh.ndim() - 1)});
}

void check_one_axis(std::string_view where, const DeviceMesh& mesh) {
  if (mesh.ndim() == 1) return;
  raise<c10::ValueError>({where, c10::str(mesh.to_string(), " has ", mesh.ndim(), " axes and none was named"),
                          "pass the axis, by name or by number"});
}

void check_inside(std::string_view where, const DeviceMesh& mesh) {
  if (mesh.contains_this_rank()) return;
  raise<c10::ValueError>(
      {where, c10::str("rank ", mesh.get_rank(), " is not in ", mesh.to_string()), "ask contains_this_rank() first"});
}

// Answers become constants of a recorded function.
void note_question(const DeviceMesh& mesh, const std::shared_ptr<const detail::MeshState>& state) {
  if (C10_UNLIKELY(tape::is_replayed())) tape::rely_on_life(mesh.to_string(), state);
}

// The one slot that MeshGuard writes.
std::optional<DeviceMesh>& current_slot() {
  static thread_local std::optional<DeviceMesh> current;
  return current;
}

}  // namespace

int64_t DeviceMesh::ndim() const {
  return int64_t(state_->shape.size());
}

int64_t DeviceMesh::size() const {
  note_question(*this, state_);
  return int64_t(state_->ranks.size());
}

int64_t DeviceMesh::size(int64_t axis) const {
  note_question(*this, state_);
  return state_->shape[checked_axis("size", *this, axis)];
}

const Sizes& DeviceMesh::shape() const {
  note_question(*this, state_);
  return state_->shape;
}

const std::vector<std::string>& DeviceMesh::dim_names() const {
  return state_->names;
}

const std::string& DeviceMesh::device_type() const {
  return state_->root->device_type();
}

at::Tensor DeviceMesh::ranks() const {
  note_question(*this, state_);
  at::Tensor ranks = at::empty(state_->shape, at::kLong);
  std::memcpy(ranks.mutable_data_ptr(), state_->ranks.data(), state_->ranks.size() * sizeof(int64_t));
  return ranks;
}

const std::vector<int64_t>& DeviceMesh::rank_list() const {
  note_question(*this, state_);
  return state_->ranks;
}

int64_t DeviceMesh::axis(const std::string& name) const {
  const auto& names = state_->names;
  const auto found = std::find(names.begin(), names.end(), name);
  if (found != names.end()) return found - names.begin();
  raise<c10::ValueError>({"axis", c10::str(to_string(), " has no axis \"", name, "\""),
                          names.empty() ? std::string("give the mesh names, or pass the axis' number")
                                        : "pass one of " + c10::Join(" ", names)});
}

Group DeviceMesh::get_group(int64_t axis) const {
  note_question(*this, state_);
  const size_t index = checked_axis("get_group", *this, axis);
  check_inside("get_group", *this);
  return state_->root->find_or_make_group(*state_, uint64_t(1) << index);
}

Group DeviceMesh::get_group(const std::string& name) const {
  return (*this)[name].get_group();
}

Group DeviceMesh::get_group() const {
  check_one_axis("get_group", *this);
  return get_group(0);
}

std::vector<Group> DeviceMesh::get_all_groups() const {
  std::vector<Group> groups;
  for (int64_t axis = 0; axis < ndim(); ++axis) groups.push_back(get_group(axis));
  return groups;
}

std::string DeviceMesh::backend(int64_t axis) const {
  return state_->root->backend_of(*state_, uint64_t(1) << checked_axis("backend", *this, axis));
}

Group DeviceMesh::get_merged_group(c10::IntArrayRef axes) const {
  note_question(*this, state_);
  uint64_t chosen = 0;
  for (size_t i = 0; i < axes.size(); ++i) {
    chosen |= uint64_t(1) << checked_axis("get_merged_group", *this, axes[i]);
  }
  const bool ascending = std::adjacent_find(axes.begin(), axes.end(), std::greater_equal<>()) == axes.end();
  if (axes.empty() || !ascending) {
    raise<c10::ValueError>({"get_merged_group", c10::str("axes [", c10::Join(", ", axes), "] of ", to_string()),
                            "pass one or more axes in ascending order, each once"});
  }
  check_inside("get_merged_group", *this);
  return state_->root->find_or_make_group(*state_, chosen);
}

const Group& DeviceMesh::root_group() const {
  return state_->root->group();
}

int64_t DeviceMesh::get_rank() const {
  note_question(*this, state_);
  return state_->root->rank();
}

int64_t DeviceMesh::get_local_rank(const std::string& name) const {
  return (*this)[name].get_local_rank();
}

int64_t DeviceMesh::get_local_rank(int64_t axis) const {
  note_question(*this, state_);
  const size_t index = checked_axis("get_local_rank", *this, axis);
  check_inside("get_local_rank", *this);
  return state_->coordinate[index];
}

int64_t DeviceMesh::get_local_rank() const {
  check_one_axis("get_local_rank", *this);
  return get_local_rank(0);
}

std::optional<std::vector<int64_t>> DeviceMesh::get_coordinate() const {
  note_question(*this, state_);
  if (!contains_this_rank()) return std::nullopt;
  return state_->coordinate;
}

bool DeviceMesh::contains_this_rank() const {
  note_question(*this, state_);
  return state_->root->contains_this_rank();
}

Position DeviceMesh::position() const {
  return {state_->shape, state_->coordinate};
}

bool DeviceMesh::operator==(const DeviceMesh& other) const {
  if (state_ == other.state_) return true;
  return root_group() == other.root_group() && device_type() == other.device_type() && shape() == other.shape() &&
         dim_names() == other.dim_names() && rank_list() == other.rank_list();
}

uint64_t DeviceMesh::id() const {
  return state_->id;
}

std::string DeviceMesh::to_string() const {
  if (state_->names.empty()) return c10::str("mesh ", c10::Join("x", state_->shape));
  std::string text = "mesh";
  for (const detail::MeshAxis& axis : state_->axes) text += c10::str(" ", axis.name, "=", axis.size());
  return text;
}

std::ostream& operator<<(std::ostream& out, const DeviceMesh& mesh) {
  return out << mesh.to_string();
}

MeshGuard::MeshGuard(const DeviceMesh& mesh) : previous_(std::exchange(current_slot(), mesh)) {}

MeshGuard::~MeshGuard() {
  current_slot() = std::move(previous_);
}

std::optional<DeviceMesh> current_mesh() {
  return current_slot();
}

std::optional<DeviceMesh> detail::exchange_current_mesh(std::optional<DeviceMesh> mesh) {
  return std::exchange(current_slot(), std::move(mesh));
}

}  // namespace serried
