// What has to be the same on all nodes of a job.
#pragma once

#include <string>

namespace serried::launch {

/// "serried 0.1.0 for LibTorch 2.13.0": of this build.
std::string version_text();

}  // namespace serried::launch
