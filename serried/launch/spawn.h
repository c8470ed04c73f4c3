// Starting one rank: fork, pipes, exec.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

#include "serried/launch/fd.h"

namespace serried::launch {

struct SpawnRequest {
  std::string path;
  std::vector<std::string> arguments;    // the first is the program's name
  std::vector<std::string> environment;  // "NAME=value"
  std::vector<int> keep_fds = {};        // the descriptors of the launcher that the program inherits
  std::vector<int> cores = {};           // the program may run on; empty: as the launcher
  int stdin_fd = -1;                     // -1: /dev/null
};

struct Child {
  pid_t pid = -1;  // also its process group
  Fd out;          // not blocking
  Fd err;
};

/// Starts a program in a process group of its own, and returns when exec has succeeded.
/// The kernel kills it when this thread ends. LaunchError with exit code 126 or 127 if exec fails.
Child spawn(const SpawnRequest& request);

}  // namespace serried::launch
