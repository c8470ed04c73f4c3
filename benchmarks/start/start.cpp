// One rank of the start-up benchmark: a first all_reduce, then "done". `bench_start ours` or `bench_start mpi`.
#include <mpi.h>

#include <cstdio>
#include <string>

#include "serried/serried.h"

namespace {

/// True where the sum is right.
bool first_all_reduce_of_ours() {
  const serried::Group world = serried::new_group();
  const at::Tensor x = at::ones({256});
  serried::all_reduce_(x, world);
  std::puts("done");
  std::fflush(stdout);
  return x[0].item<float>() == float(world->getSize());
}

/// The tensor makes this rank load and start LibTorch too.
bool first_all_reduce_of_mpi(int* argc, char*** argv) {
  MPI_Init(argc, argv);
  int size = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  const at::Tensor x = at::ones({256});
  MPI_Allreduce(MPI_IN_PLACE, x.mutable_data_ptr(), 256, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  std::puts("done");
  std::fflush(stdout);
  const bool right = x[0].item<float>() == float(size);
  MPI_Finalize();
  return right;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string which = argc > 1 ? argv[1] : "";
  if (which == "ours") return first_all_reduce_of_ours() ? 0 : 1;
  if (which == "mpi") return first_all_reduce_of_mpi(&argc, &argv) ? 0 : 1;
  std::fprintf(stderr, "usage: bench_start ours | mpi\n");
  return 2;
}
