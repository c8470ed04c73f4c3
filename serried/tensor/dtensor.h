// DTensor: an at::Tensor with the global shape, of which each rank of a mesh holds its part.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

#include "serried/comm/collectives/async.h"
#include "serried/mesh/mesh.h"

namespace serried {

struct FromLocalOptions {
  bool run_check =
      false;  // compare dtype and sizes across the mesh and broadcast replicated parts from their first rank
  OptionalSizes shape = {};  // global; both or none. None: every rank's part is as large as this one
  OptionalSizes stride = {};
  std::optional<Placements> grad_placements =
      {};  // of the gradient that comes back; none: as given, Partial -> Replicate
};

struct ToLocalOptions {
  std::optional<Placements> grad_placements = {};
};

struct RedistributeOptions {
  std::optional<at::ScalarType> forward_dtype = {};   // what the forward communicates and returns
  std::optional<at::ScalarType> backward_dtype = {};  // what the backward communicates
};

struct DistributeOptions {
  std::optional<int> source = 0;  // the rank of each axis whose values count; none: every rank cuts its own copy
};

/// A view of a tensor that is distributed: any op takes it as the at::Tensor it is.
class DTensor : public at::Tensor {
 public:
  DTensor() = default;
  /// TypeError where `t` is plain.
  explicit DTensor(at::Tensor t);

  /// Each rank's own tensor as its part of a global one. Communicates only with run_check. Differentiable.
  static DTensor from_local(const at::Tensor& local, const DeviceMesh& mesh, const Placements& placements = {},
                            FromLocalOptions options = {});

  /// This rank's part. Differentiable.
  at::Tensor to_local(ToLocalOptions options = {}) const;
  /// The same tensor placed otherwise. Differentiable, twice.
  DTensor redistribute(const Placements& placements, RedistributeOptions options = {}) const;
  /// On another mesh of the same root group; the ranks of both call it.
  DTensor redistribute(const DeviceMesh& mesh, const Placements& placements) const;
  /// The whole value on every rank, as a plain tensor. Differentiable.
  at::Tensor full_tensor(ToLocalOptions options = {}) const;

  const DeviceMesh& device_mesh() const;
  const Placements& placements() const;

  /// Where this rank's part lies: one (offset, size) per dim and chunk. ValueError where a placement is Partial.
  struct Chunk {
    Sizes offsets;
    Sizes sizes;
  };
  std::vector<Chunk> local_chunks() const;
};

/// redistribute that is started only: the same checks, result and gradient; wait() gives the DTensor. `x` may not be
/// written before wait(), which raises if it was. Where it takes several collectives (explain names them) all but the
/// last happen in this call, so that collectives keep the order of the calls; the last one overlaps with what follows.
/// Cuts that come after it happen in wait().
///     Pending moving = async::redistribute(w, {Replicate()});
///     compute();
///     DTensor whole(moving.wait());
namespace async {
Pending redistribute(const DTensor& x, const Placements& placements, RedistributeOptions options = {});
Pending redistribute(const DTensor& x, const DeviceMesh& mesh, const Placements& placements);
}  // namespace async

bool is_dtensor(const at::Tensor& t);

/// The global tensor's placements over a mesh: every rank passes a tensor of the same shape, the values of the mesh's
/// first rank count. requires_grad is kept.
///     DTensor d = distribute_tensor(full, mesh, {Shard(0), Replicate()});
DTensor distribute_tensor(const at::Tensor& full, const DeviceMesh& mesh, const Placements& placements = {},
                          DistributeOptions options = {});

/// "DTensor f32[8,4] S0 R on mesh dp=2 tp=2, local [4,4] = ..."
std::ostream& operator<<(std::ostream& out, const DTensor& t);

}  // namespace serried
