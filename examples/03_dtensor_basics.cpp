// One tensor over four ranks: placed, computed with, placed otherwise, and looked at. serried run -n 4
// ./03_dtensor_basics
#include <serried/serried.h>

#include <iostream>

using namespace serried;

int main() {
  const Group world = new_group();
  const bool first = world->getRank() == 0;
  const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"dp", "tp"}, {.group = world});

  // A DTensor is an at::Tensor of the global shape. Rank 0's values count; each rank keeps only its part.
  const DTensor x = distribute_tensor(at::arange(40.0).view({10, 4}), mesh, {Shard(0), Replicate()});
  const DTensor w = distribute_tensor(at::ones({4, 6}), mesh, {Replicate(), Shard(1)});

  // Ops know nothing of ranks. Here no communication is needed at all.
  const DTensor y(at::gelu(at::mm(x, w)));
  if (first) {
    std::cout << "y is " << y.sizes() << ", placed " << to_string(y.placements()) << ", here " << y.to_local().sizes()
              << "\n"
              << visualize_sharding(y);
  }

  // A sum over a cut dim stays pending until somebody needs it.
  const DTensor column_sums(y.sum(0));
  const at::Tensor whole = column_sums.full_tensor();
  if (first) std::cout << "sums are placed " << to_string(column_sums.placements()) << ": " << whole << "\n";

  // Placing otherwise is explicit, and differentiable.
  CommDebugMode comm;
  const DTensor rows = y.redistribute({Shard(0), Shard(0)});
  if (first) std::cout << "to " << to_string(rows.placements()) << " took " << comm.report();

  // The same numbers as one process gives.
  const at::Tensor expected = at::gelu(at::arange(40.0).view({10, 4}).mm(at::ones({4, 6})));
  return at::allclose(rows.full_tensor(), expected) ? 0 : 1;
}
