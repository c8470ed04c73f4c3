// Binding ranks to the memory nodes of a machine, as the kernel lists them: no libnuma.
#pragma once

#include <string>
#include <vector>

namespace serried::launch {

/// The cores of each memory node that has some, of those in `allowed`, in the order of the nodes. `root` has a folder
/// per node, with a file cpulist: "0-3,8". Empty where there is no such folder.
std::vector<std::vector<int>> numa_nodes(const std::vector<int>& allowed,
                                         const std::string& root = "/sys/devices/system/node");

/// "0-3,8" as numbers; LaunchError if it is no such list.
std::vector<int> parse_cores(const std::string& text);

/// The cores that this process may use.
std::vector<int> allowed_cores();

/// The cores of the node to which the `local_rank`-th of `num_local` ranks is bound: neighbours share a node, and nodes
/// have as many ranks each as can be. LaunchError if there is no node.
std::vector<int> cores_of_rank(const std::vector<std::vector<int>>& nodes, int local_rank, int num_local);

}  // namespace serried::launch
