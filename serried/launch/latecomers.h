// Ranks that others wait for at the start: seen from outside, by the files that ranks hold open while they wait.
#pragma once

#include <sys/types.h>

#include <map>
#include <string>

namespace serried::launch {

/// "ranks 0, 2 wait in new_group for rank 1 (pid 4712)" of ranks of this node by number; "" where none waits, or all
/// do, who then wait for nobody here. Pid 0: that rank has ended, and is waited for in vain.
std::string latecomers_text(const std::map<int, pid_t>& ranks);

}  // namespace serried::launch
