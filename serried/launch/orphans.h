// Children of ranks that lost their parent: a launcher inherits them, so it has to reap them.
#pragma once

#include <sys/types.h>

#include <functional>

namespace serried::launch {

/// Reaps every child of this process that has ended, save those that `is_kept` names. Call it on SIGCHLD, with the
/// child that sent it.
void reap_orphans(pid_t from, const std::function<bool(pid_t)>& is_kept);

}  // namespace serried::launch
