// Named regions of a thread's forward pass, and which of them an autograd node comes from.
#pragma once

#include <cstdint>
#include <string>

namespace serried::detail {

/// Enters and leaves a region; leaving takes what entering returned.
uint64_t enter_region(const std::string& name);
void leave_region(uint64_t first_node);

/// Remember which autograd nodes were made in which region from now on, or no more; calls nest.
void keep_region_history();
void drop_region_history();

struct Where {
  std::string path;
  bool backward = false;
};

/// The region this thread is in. Inside backward: the one whose forward made the node that runs.
Where current_region();

}  // namespace serried::detail
