// A group of any size for one rank alone: for what is only counted, never sent.
#pragma once

#include "serried/comm/groups/group.h"

namespace serried::testing {

inline Group fake_group(int rank, int world_size) {
  return new_group("fake", {.rank = rank, .world_size = world_size});
}

}  // namespace serried::testing
