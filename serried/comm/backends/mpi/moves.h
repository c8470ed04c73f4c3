// Calls of MPI that do not block, for any number of bytes: what is too long for an int goes in pieces.
#pragma once

#include "serried/comm/backends/mpi/posted.h"

namespace serried::mpi {

/// Bytes in memory.
struct Part {
  const void* data = nullptr;
  int64_t bytes = 0;
};

/// Elements that are reduced.
struct Reduction {
  MPI_Datatype type;
  int64_t element_bytes;
  MPI_Op op;
};

void post_barrier(MPI_Comm comm, Posted& posted);
void post_broadcast(MPI_Comm comm, const Part& part, int root, Posted& posted);

/// Every rank's `mine`, all of one length, in a row at `all`.
void post_all_gather(MPI_Comm comm, const Part& mine, void* all, Posted& posted);

/// sent[r] to rank r, received[r] from rank r; wherever in memory they lie.
void post_exchange(MPI_Comm comm, const std::vector<Part>& sent, const std::vector<Part>& received, Posted& posted);

/// One number for each rank.
void post_exchange_of_numbers(MPI_Comm comm, const int64_t* sent, int64_t* received, Posted& posted);

/// `in` and `out` may be one.
void post_all_reduce(MPI_Comm comm, const void* in, void* out, int64_t count, const Reduction& how, Posted& posted);

/// `out` counts at the root alone, and may be `in`.
void post_reduce(MPI_Comm comm, const void* in, void* out, int64_t count, int root, const Reduction& how,
                 Posted& posted);

/// The sum of part r of `in`, of counts[r] elements, at `out` of rank r. They do not overlap.
void post_reduce_scatter(MPI_Comm comm, const void* in, void* out, const std::vector<int64_t>& counts,
                         const Reduction& how, Posted& posted);

void post_send(MPI_Comm comm, const Part& part, int peer, int tag, Posted& posted);
void post_receive(MPI_Comm comm, const Part& part, int peer, int tag, Posted& posted);

}  // namespace serried::mpi
