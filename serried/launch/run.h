// The library behind `serried run`.
#pragma once

#include "serried/launch/options.h"

namespace serried::launch {

/// Runs the job of `options` to its end and returns the code to exit with: 0, the culprit's, or 128 + signal.
/// Reads the ranks' output and prints it to stdout and stderr. Takes over the process's signals while it runs.
/// LaunchError for what is wrong before any rank has started; no rank is left when it returns or throws.
int run(const Options& options);

}  // namespace serried::launch
