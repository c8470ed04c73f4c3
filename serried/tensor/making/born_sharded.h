// A scope in which new tensors are born as DTensors, so that modules larger than one rank's memory can be built.
#pragma once

#include <functional>
#include <memory>

#include "serried/mesh/mesh.h"

namespace serried {

/// Where a new tensor of `sizes` goes. Not asked for tensors without dims, which are replicated.
using PlacementFunction = std::function<Placements(at::IntArrayRef sizes)>;

/// While alive, tensors made on this thread without others to begin from (torch::empty, zeros, rand, ...) are DTensors
/// on `mesh`; each rank allocates its part only. Random initialisation equals that of plain tensors for the same seed.
/// Tensors from data in C++ (torch::tensor, from_blob) cannot be made inside. Nests; the inner one counts.
///     manual_seed(7, mesh);
///     BornSharded guard(mesh, [](at::IntArrayRef) -> Placements { return {Shard(0)}; });
///     torch::nn::Linear big(1 << 16, 1 << 16);
class BornSharded {
 public:
  BornSharded(const DeviceMesh& mesh, PlacementFunction placements);
  ~BornSharded();
  BornSharded(const BornSharded&) = delete;
  BornSharded& operator=(const BornSharded&) = delete;

  struct Scope;  // of born_sharded.cpp

 private:
  std::unique_ptr<Scope> scope_;
};

}  // namespace serried
