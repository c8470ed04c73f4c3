// The threads backend: ranks are threads of one process.
#pragma once

#include "serried/comm/groups/group.h"

namespace serried {

/// The engine of the shm backend, where every rank can reach every tensor of its peers: nothing is staged.
Group make_threads_group(const FactoryArgs& args);

}  // namespace serried
