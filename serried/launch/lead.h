// The library behind `serried rendezvous`.
#pragma once

#include "serried/launch/options.h"

namespace serried::launch {

/// Leads the job whose nodes meet at options.rendezvous, an address of this machine, and has none of its ranks. Returns
/// the code to exit with when the job ends: the job's own. Takes over the process's signals while it runs.
/// LaunchError for mistakes, and if not enough nodes come in time.
int lead(const Options& options);

}  // namespace serried::launch
