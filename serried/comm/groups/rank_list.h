// Ranks in messages, the same way everywhere.
#pragma once

#include <string>
#include <vector>

namespace serried::detail {

/// "rank 3", "ranks 1, 2", "ranks 0-5, 9"; `ranks` ascend.
std::string rank_list(const std::vector<int>& ranks);

}  // namespace serried::detail
