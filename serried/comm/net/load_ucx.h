// The plug-in with UCX, loaded so that it leaves the process alone.
#pragma once

#include "serried/base/plugin.h"

namespace serried::net {

/// libserried_ucx.so; loaded by the first call of the process.
const detail::FoundPlugin& load_ucx();

}  // namespace serried::net
