// Ranks that a signal has stopped: they are there, but do not come.
#pragma once

#include <string>
#include <vector>

namespace serried::detail {

/// "; rank 1 (pid 1234) is stopped: SIGCONT lets it go on", given each rank's process on this host (0: not known);
/// nothing where none is.
std::string stopped_text(const std::vector<int>& pids);

}  // namespace serried::detail
