// What the options of a group mean to backends that share memory.
#pragma once

#include "serried/comm/backends/shm/connect.h"
#include "serried/comm/groups/group.h"

#include <string>

namespace serried::shm {

/// "heap_mb" and "always_stage", for `backend`.
ConnectArgs connect_args(const FactoryArgs& args, const std::string& backend);

}  // namespace serried::shm
