// The collectives of ranks on several hosts: neighbours share memory, hosts exchange messages.
//
// A collective begins with an arrival: each rank tells one rank of every other host what it calls, and what it offers,
// with all bytes of it where they are few. Receivers write that into the memory of their host, where it lies beside
// what neighbours tell each other: so every rank compares all calls, and finds small collectives complete. Large
// pieces follow in steps.
#pragma once

#include "serried/comm/backends/hierarchical/links.h"
#include "serried/comm/backends/hierarchical/order.h"
#include "serried/comm/backends/hierarchical/stream.h"
#include "serried/comm/backends/hierarchical/wire_mail.h"
#include "serried/comm/backends/shm/engine.h"

#include <deque>
#include <memory>
#include <string>
#include <vector>

namespace serried::hierarchical {

using shm::Op;
using shm::Piece;
using shm::Pieces;

/// What a rank tells of its part of a collective. Behind it lie the sizes of its pieces, where those are not all alike,
/// and its bytes, where `carries` is set.
struct alignas(64) Arrival {
  /// More bytes than that come in steps.
  static constexpr int64_t kMostCarried = 32 << 10;

  /// What one takes, with all that lies behind it.
  static int64_t room(int num_ranks);

  watch::Record record;
  uint64_t fingerprint;
  int64_t piece_bytes;    // of each piece; -1: there is a table
  uint32_t one_per_peer;  // 0: one piece for everybody
  uint32_t carries;
};

class HierarchicalEngine final : public shm::Runner {
 public:
  HierarchicalEngine(std::unique_ptr<shm::Engine> local, Topology topology, Order order,
                     std::unique_ptr<net::Wire> wire);
  ~HierarchicalEngine() override;

  void arrive(Op& op) override;
  bool all_have_arrived(const Op& op) override;
  void complete(Op& op) override;
  void abort(const std::string& why, shm::PhaseSync::Cause cause) override;
  void leave() override;

  int rank() const override { return local_->rank(); }
  int world_size() const override { return local_->world_size(); }
  uint64_t sequence() const override { return local_->sequence(); }
  const shm::Segment& segment() const override { return local_->segment(); }
  shm::PhaseSync& sync() override { return local_->sync(); }
  shm::FarMail* far_mail() override { return &mail_; }

 private:
  /// One message that an arrival is.
  struct Post {
    int peer;
    net::Transfer transfer;
    bool taken = false;
  };

  Arrival& arrival_of(int rank, const Op& op) const;
  bool has_come(int rank, const Op& op) const;
  bool is_neighbour(int other) const { return topology_.host_of(other) == topology_.host_of(rank()); }
  const std::vector<int>& neighbours() const { return topology_.neighbours(rank()); }
  void complete_kind(Op& op);

  // arrivals.cpp
  int64_t lay_out_arrival(const Op& op);
  void post_arrivals(const Op& op, int64_t bytes);
  bool take_arrivals(const Op& op);
  void take(Post& post, const Op& op);
  std::string problem_of(const Arrival& arrival, int64_t bytes) const;
  void meet(const Op& op);
  void compare(const Op& op);
  void fail_for_mismatch(const Op& op);
  void look_for_mismatch(const Op& op);
  bool disagree(int rank, int other, const Op& op) const;
  void end_posts(bool cancel);
  /// What `from` offers `to`: data is null where the bytes come in steps.
  Piece offered(int from, int to, const Op& op) const;
  int64_t offered_bytes(int from, int to, const Op& op) const;
  bool carries(int rank, const Op& op) const { return arrival_of(rank, op).carries != 0; }
  void check_size(int peer, int64_t offered, int64_t expected, const Op& op);

  // exchange.cpp
  void exchange(const Op& op);
  void lay_down(int from, const Op& op, const char* data, int64_t bytes) const;
  void exchange_rows(const Op& op);
  /// A piece of each rank for each other one; those of ranks in `skip` have come already.
  void move_each(const Op& op, const Pieces& offers, const Pieces& sinks, const std::vector<bool>& skip);
  /// One piece of each rank for all others.
  void move_shared(const Op& op, Piece mine, const Pieces& sinks, const std::vector<bool>& skip);
  void share_with_neighbours(const Op& op, const Pieces& sinks, const std::vector<bool>& skip);
  bool neighbours_exchange(const Op& op, const std::vector<bool>& skip) const;
  void run_local_step(const Op& op, Pieces offers, Pieces sinks);
  std::vector<bool> carried(const Op& op) const;
  void send(int peer, Piece piece);
  void receive(int peer, Piece piece);
  bool go_on_with_streams();
  void finish_streams();

  // broadcast.cpp
  std::vector<int> line_from(int root) const;
  void pass_down_the_line(const Op& op, Piece whole);

  // reduce.cpp
  void all_reduce(const Op& op);
  bool takes_sums(const Op& op) const;
  void reduce_by_sums(const Op& op, OrderedReduction& reduction);
  void all_reduce_by_chain(const Op& op);
  void reduce_by_chain_to_owners(const Op& op);
  void reduce_to_owners(const Op& op);
  void check_contributions(const Op& op);
  bool reduce_carried(const Op& op, OrderedReduction& reduction, Piece result);
  void reduce_contributions(const Op& op, const Pieces& offers, Piece result, int64_t largest);
  int64_t largest_piece(const Op& op) const;

  const std::unique_ptr<shm::Engine> local_;
  const Topology topology_;
  Links links_;
  WireMail mail_;
  const std::vector<int> receivers_;
  const std::vector<int> tellers_;
  std::deque<Post> coming_;
  std::deque<Post> going_;
  std::deque<Stream> streams_;
  const Order order_;
  const bool takes_chain_;
  bool moves_parts_ = false;   // the chain, or sums, are under way
  uint64_t num_steps_ = 0;     // of the current collective
  uint64_t disagreement_ = 0;  // the collective in which one was seen that not all know yet
  std::vector<char> scratch_;
};

}  // namespace serried::hierarchical
