// Stands in for an MPI backend: says that there is none and what to use.
#include "serried/comm/backends/mpi/mpi.h"

#include "serried/base/error.h"

namespace serried {

std::string why_mpi_unavailable() {
  return "this version of serried has no MPI backend";
}

Group make_mpi_group(const FactoryArgs&) {
  raise<c10::NotImplementedError>(
      {"new_group", "\"mpi\" does not work here: " + why_mpi_unavailable(),
       "use \"auto\", \"shm\" or \"gloo\"; programs started by mpirun find each other with any of them"});
}

}  // namespace serried
