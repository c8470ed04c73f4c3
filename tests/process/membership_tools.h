// Nodes that join a membership, at times.
#pragma once

#include <string>
#include <vector>

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

inline MembershipOptions keeping(int min_nodes, int max_nodes, int max_restarts = 0) {
  MembershipOptions options = options_for(min_nodes, max_nodes, max_restarts);
  options.keep_going = true;
  options.join_timeout = Seconds(60);
  return options;
}

/// Orders of tables as texts: "1:table2@0,3*/5" is for member 1, generation 2, ranks 0 and 3 of 5, 3 to be started.
inline std::vector<std::string> tables(Membership& membership) {
  std::vector<std::string> result;
  for (const auto& [member, order] : membership.take_orders()) {
    using Kind = Order::Kind;
    std::string text = std::to_string(member) + ":";
    const Assignment& a = order.assignment;
    if (order.kind == Kind::start || order.kind == Kind::table) {
      text += (order.kind == Kind::start ? "start" : "table") + std::to_string(a.attempt) + "@";
      for (const Seat& seat : a.seats) text += std::to_string(seat.rank) + (seat.fresh ? "*," : ",");
      text.back() = '/';
      text += std::to_string(a.world_size);
    }
    if (order.kind == Kind::over) text += "over" + std::to_string(a.attempt);
    if (order.kind == Kind::stop) text += "stop";
    if (order.kind == Kind::exit) text += "exit" + std::to_string(order.exit_code);
    result.push_back(text);
  }
  return result;
}

inline Cause exit_3() {
  return {.rank = 4, .exit_code = 3};
}

}  // namespace serried::launch
