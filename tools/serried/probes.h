// What this machine permits, tried out rather than looked up.
#pragma once

#include <string>
#include <vector>

namespace serried::tools {

struct Probe {
  std::string name;
  bool works = false;
  std::string detail;      // what was found, or why it does not work
  bool essential = false;  // without it, no job runs
};

/// Cores, memory, shared memory, pidfds, cross-memory attach. Forks: call it before any thread starts.
std::vector<Probe> probe_machine();

}  // namespace serried::tools
