// What the launcher says in environment variables: torchrun and serried run, Open MPI, MPICH, srun.
#pragma once

#include <cstdint>
#include <string>

#include "serried/base/first_host.h"

namespace serried::detail {

struct LaunchEnvironment {
  int rank = -1;
  int world_size = -1;
  std::string master_addr;
  uint16_t master_port = 0;
  bool agent_keeps_store = false;  // TORCHELASTIC_USE_AGENT_STORE: rank 0 is a client too
  bool several_hosts = false;      // known: fewer ranks on this host than in the job
};

/// What the caller knows already; -1: not.
struct GivenRanks {
  int rank = -1;
  int world_size = -1;
};

/// Reads torchrun's names first, else those of the MPI or srun that started the process. ValueError that lists every
/// variable that is missing or malformed. MASTER_ADDR and MASTER_PORT may be missing under mpirun on one host and under
/// srun.
LaunchEnvironment read_launch_environment(GivenRanks given);

/// How often all ranks of this job have started again; 0 where ranks that began at different times meet
/// (serried run --keep-going).
int64_t attempt_of_all();

/// The socket of SERRIED_MASTER_LISTEN_FD, -1 if there is none. Unsets the variable: child processes must not use it
/// again.
int take_listen_fd();

}  // namespace serried::detail
