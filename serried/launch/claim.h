// What a launcher says of the ranks that it keeps to a leader that was started after them.
#pragma once

#include <string>
#include <vector>

#include "serried/launch/wire.h"

namespace serried::launch {

/// A process of the node in the table of ranks that it was told last.
struct ClaimedSeat {
  int number = 0;
  int rank = 0;
  bool elastic = false;  // it has said that it uses Elastic
  bool lives = true;
  bool operator==(const ClaimedSeat&) const = default;
};

/// --keep-going: a node's part in that table, and what the leader that is gone knew of the job beside it.
struct Claim {
  std::string run_id = {};
  std::string job_secret = {};
  int generation = 0;
  int world_size = 1;
  int num_nodes = 1;
  int node_rank = 0;
  int num_with_leader = 0;        // ranks of that table that were the leader's own
  bool leader_was_apart = false;  // it had no ranks ever: serried rendezvous
  int restarts = 0;               // that the job has used up
  int next_seat = 0;              // no seat has had this number, or a higher one
  std::string master_host = {};
  int master_port = 0;
  bool any_done = false;  // a rank of this node has ended with 0
  std::vector<ClaimedSeat> seats = {};
  bool operator==(const Claim&) const = default;
};

/// Whether a rank of it lives on.
bool any_lives(const Claim& claim);

/// As fields of a message, and back. std::runtime_error if they make no sense.
std::vector<std::string> to_fields(const Claim& claim);
Claim claim_from_fields(const Message& message, size_t first);

}  // namespace serried::launch
