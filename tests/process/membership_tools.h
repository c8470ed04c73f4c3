// Nodes that join a membership, at times.
#pragma once

#include <string>

#include "serried/launch/membership.h"

namespace serried::launch {

inline constexpr Time kBegin{};

inline Time at(double seconds) {
  return kBegin + std::chrono::duration_cast<Clock::duration>(Seconds(seconds));
}

inline MembershipOptions options_for(int min_nodes, int max_nodes, int max_restarts = 0) {
  return {.min_nodes = min_nodes,
          .max_nodes = max_nodes,
          .max_restarts = max_restarts,
          .run_id = "id",
          .new_master_port = [] { return 1; }};
}

inline Joiner joiner(const std::string& host, int min_nodes, int max_nodes, int num_local, int node_rank = -1) {
  return {.host = host,
          .machine = "machine of " + host,
          .node_rank = node_rank,
          .min_nodes = min_nodes,
          .max_nodes = max_nodes,
          .num_local = num_local};
}

inline Cause exit_3() {
  return {.rank = 4, .exit_code = 3};
}

}  // namespace serried::launch
