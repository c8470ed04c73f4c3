// Activations that every rank has whole are saved for backward in parts.
#pragma once

#include <cstdint>
#include <memory>

#include "serried/mesh/mesh.h"

namespace serried {

struct SavedShardedOptions {
  int64_t min_bytes = 4096;  // of a whole tensor; smaller ones stay whole
};

/// While alive, what autograd saves of activations that are replicated DTensors over `mesh`, of one axis, is kept as
/// this rank's part along `dim`; backward gathers it again. All ranks of the mesh have the scope. Gradients are the
/// same, bit for bit. What stays as it is: parameters, buffers and everything else that no op with a gradient has made,
/// tensors cut or pending over the mesh, of fewer elements along `dim` than ranks, or without that dim. A negative
/// `dim` counts from the back. Uneven dims are cut unevenly. Nests: the innermost scope counts.
///     SavedSharded guard(mesh["tp"], 1);
///     at::Tensor y = net(x);
class SavedSharded {
 public:
  SavedSharded(const DeviceMesh& mesh, int64_t dim, SavedShardedOptions options = {});
  ~SavedSharded();
  SavedSharded(const SavedSharded&) = delete;
  SavedSharded& operator=(const SavedSharded&) = delete;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace serried
