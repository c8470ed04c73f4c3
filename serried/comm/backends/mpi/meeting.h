// Ranks of a group find out which ranks of MPI they are, and get a communicator of their own.
#pragma once

#include <mpi.h>

#include "serried/comm/agree/rank_texts.h"

namespace serried::mpi {

/// Blocks until all have come. DistBackendError on every rank where they are not processes of one MPI job, or where MPI
/// would have to begin without some of its ranks. Errors of the communicator are returned.
MPI_Comm meet(const detail::StoreRanks& ranks);

}  // namespace serried::mpi
