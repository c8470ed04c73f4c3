// Layouts that a parameter asks of the ops that consume it: of what comes in, and of what goes out.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>

#include "serried/mesh/mesh.h"
#include "serried/tensor/use.h"

namespace serried::detail {

/// Placements whose dims may count from the back: resolved for whatever tensor they meet.
class AskedLayout {
 public:
  /// Nothing is asked: a DTensor passes as it is, and a plain tensor counts as Replicate.
  AskedLayout() = default;
  explicit AskedLayout(Placements placements);

  bool is_asked() const { return !given_.empty(); }
  const Placements& given() const { return given_; }
  /// For a tensor of `ndim` dims; IndexError where it lacks a dim that is asked to be cut.
  const Placements& of(int64_t ndim) const {
    if (C10_LIKELY(ndim < kKnownDims && !resolved_[size_t(ndim)].empty())) return resolved_[size_t(ndim)];
    return resolve(ndim);
  }

 private:
  static constexpr int64_t kKnownDims = 6;
  const Placements& resolve(int64_t ndim) const;

  Placements given_;
  std::array<Placements, kKnownDims> resolved_;  // empty: not for this many dims
};

struct RoleLayouts {
  AskedLayout input;
  AskedLayout output;
  bool by_style = false;  // else a plain input counts as Replicate and nothing else is asked
};

/// How ops may consume a parameter: as the matrix of a linear layer, as the table of an embedding, as the weight of a
/// norm. A parameter that modules share has several roles.
enum class Role : uint8_t { matrix, table, norm };

struct UseLayouts {
  explicit UseLayouts(DeviceMesh mesh_) : mesh(std::move(mesh_)) {}

  const std::optional<RoleLayouts>& of(Role role) const { return roles[size_t(role)]; }
  std::optional<RoleLayouts>& of(Role role) { return roles[size_t(role)]; }

  DeviceMesh mesh;
  std::array<std::optional<RoleLayouts>, 3> roles;
  UsePtr transposed;          // what the transpose of a matrix is marked with; null: nothing
  bool is_transpose = false;  // these are the layouts of a transpose
};

/// Marks `parameter`, a DTensor: it asks `layouts` in `role`, beside what it asks in others.
void set_role(const at::Tensor& parameter, const DeviceMesh& mesh, Role role, RoleLayouts layouts);

/// What `parameter` asks in `role`; null: nothing.
const RoleLayouts* role_of(const at::Tensor& parameter, Role role);

/// `x`, a DTensor, in `placements` (resolved). Its gradient comes back in the placements of `x` with pending sums done,
/// even where nothing moves in forward: so it is summed up once, here, whoever consumes the result.
at::Tensor entered(const at::Tensor& x, const Placements& placements);

}  // namespace serried::detail
