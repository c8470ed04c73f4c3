// A launcher per node, started by srun: what Slurm's environment says about the nodes.
#pragma once

#include <optional>
#include <string>

namespace serried::launch {

struct SlurmNodes {
  int num_nodes;
  int node_rank;
  std::string rendezvous;  // the first node, with a port made of the numbers of job and step
};

/// Nothing where srun did not start this process on several nodes, and in ranks of another launcher. LaunchError where
/// it started more than one launcher per node, or says what makes no sense.
std::optional<SlurmNodes> slurm_nodes();

}  // namespace serried::launch
