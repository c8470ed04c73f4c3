// A group of any size without peers: shapes are checked, nothing moves, values mean nothing.
#pragma once

#include "serried/comm/groups/group.h"

namespace serried {

/// Plans a run of thousands of ranks in one process. Option "error_on_collective" (bool): every call raises.
///     Group g = new_group("fake", {.rank = 0, .world_size = 4096});
Group make_fake_group(const FactoryArgs& args);

}  // namespace serried
