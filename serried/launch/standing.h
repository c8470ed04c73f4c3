// What a launcher remembers of the table that its ranks are in, for a leader that is started after the last one is
// lost. Pure: no sockets.
#pragma once

#include <map>
#include <optional>
#include <set>
#include <vector>

#include "serried/launch/claim.h"
#include "serried/launch/order.h"

namespace serried::launch {

/// Is told each order, and what becomes of the node's ranks.
class Standing {
 public:
  void hear(const Order& order);
  void rank_is_elastic(int seat) { elastic_.insert(seat); }
  void rank_done(int seat);
  void rank_lost(int seat, const Cause& cause) { ended_[seat] = cause; }

  /// Whether the node has a place in a table whose ranks live on without their leader: under --keep-going, until it is
  /// told to stop.
  bool outlives_leader() const { return table_.has_value(); }
  int generation() const { return table_->attempt; }
  int node_rank() const { return table_->node_rank; }
  /// Whether ranks of the table are gone without a leader that would say so: its own, or some of this node.
  bool is_broken_without_leader() const;
  /// Whether all ranks of the node have ended with 0, as far as they were not lost before.
  bool is_done() const;

  /// What a new leader is told first, and then: how ranks of the table have ended, of which the old one may not have
  /// known.
  Claim claim(bool leader_was_apart) const;
  std::vector<Message> ends() const;

 private:
  std::optional<Assignment> table_;
  std::set<int> elastic_;
  std::map<int, std::optional<Cause>> ended_;  // by seat; with 0: no cause
  bool any_done_ = false;
};

/// How the end of a rank is told.
Message done_message(int seat);
Message lost_message(int seat, const Cause& cause);

}  // namespace serried::launch
