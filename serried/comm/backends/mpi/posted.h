// What MPI was asked for in one step of a call, and what it reads and writes until it is done.
#pragma once

#include <mpi.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace serried::mpi {

/// Counts of MPI are ints, and some of its internals do not like those that are near to their end.
inline constexpr int64_t kPieceBytes = int64_t(1) << 30;

/// The arguments of one call that MPI may read until it is done.
struct ExchangeArguments {
  std::vector<int> send_counts, receive_counts, displacements;
  std::vector<MPI_Datatype> send_types, receive_types;
};

struct Posted {
  int64_t piece_bytes = kPieceBytes;  // no call asks for more
  std::vector<MPI_Request> requests = {};
  std::vector<MPI_Status> statuses = {};  // once all requests are done
  std::vector<MPI_Datatype> types = {};   // made for this step
  std::vector<std::unique_ptr<ExchangeArguments>> arguments = {};

  MPI_Request* next() { return &requests.emplace_back(MPI_REQUEST_NULL); }

  /// Frees the types; the caller has the turn, and nothing is under way.
  void free_types() {
    for (MPI_Datatype& type : types) MPI_Type_free(&type);
    types.clear();
    arguments.clear();
  }
};

}  // namespace serried::mpi
