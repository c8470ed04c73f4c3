// The collectives over one segment: each is "arrive", which never blocks, then "complete".
#pragma once

#include "serried/comm/backends/shm/runner.h"

#include <c10/util/SmallVector.h>

#include <optional>
#include <string>
#include <vector>

namespace serried::shm {

class Engine final : public Runner {
 public:
  /// `members`: the ranks that share the segment, ascending; empty: all for whom it has room. Of the others it knows
  /// what somebody else writes there.
  Engine(Segment segment, int rank, WaitPolicy policy, bool one_process, std::vector<int> members = {});

  /// Waits until every member has mapped the segment.
  /// `place` is where the ranks met before, for messages.
  void meet(std::chrono::milliseconds timeout, const std::string& place);

  void arrive(Op& op) override;
  bool all_have_arrived(const Op& op) override;
  void complete(Op& op) override;
  void abort(const std::string& why, PhaseSync::Cause cause = PhaseSync::Cause::failure) override;
  void leave() override { sync_.leave(); }

  /// The parts of it, for collectives of which this engine does the steps within the host: a call begins, and then come
  /// any number of steps, whose pieces are those of members.
  void begin(Op& call);
  void arrive_at_step(Op& op);
  void complete_step(Op& op);

  int rank() const override { return rank_; }
  uint64_t sequence() const override { return sequence_; }
  int world_size() const override { return segment_.world_size(); }
  const Segment& segment() const override { return segment_; }
  PhaseSync& sync() override { return sync_; }
  bool one_process() const { return memory_.one_process(); }

 private:
  void publish(Op& op, uint32_t flags, uint64_t address, uint64_t extent);
  /// As it is now: a peer that is out of its mind may change it at any time, so each use works on one copy.
  Offer offer_of(int peer, const Op& op) const { return read_once(segment_.line(peer).offers[op.parity]); }
  void check_fingerprint(int peer, const Op& op);
  void wait_for_all(const Op& op);
  bool any_offer_has(uint32_t flag, const Op& op) const;

  // What a peer says of its memory is used only within the bounds of what it shares.
  char* reach(int peer, uint64_t location, int64_t bytes);
  const char* reach_slot(int peer, const Op& op, uint64_t offset, int64_t bytes);
  [[noreturn]] void fail_for_wild_offer(int peer);
  std::optional<Visit> visit_for(const Op& op);

  void arrive_all_reduce(Op& op);
  void complete_all_reduce(Op& op);
  void reduce_slots(Op& op);
  void reduce_in_place_of_all(Op& op);
  void reduce_in_chunks(Op& op);
  void stage_slices(const Op& op, int64_t chunk);

  void arrive_with_pieces(Op& op);
  void copy_to_slot(Op& op);
  void stage_pieces(const Op& op, int64_t round);
  int64_t piece_chunk(bool same_for_all) const;
  int64_t num_rounds(const Op& op);
  Piece offered_by(int peer, const Offer& offer, const Op& op) const;
  void check_size(int peer, int64_t offered, int64_t expected);
  void complete_exchange(Op& op);
  void lay_down(int peer, const Op& op, const char* from, int64_t begin, int64_t bytes) const;
  void pull(int peer, const Op& op);
  void pull_round(int peer, const Op& op, int64_t round);
  void complete_reduce_pieces(Op& op);
  const char* contribution(int peer, const Op& op, int64_t begin, int64_t bytes);
  void reduce_block(const Op& op, int64_t begin, int64_t end);
  void finish_reading();
  void finish_round_trip(const Op& op);

  int num_members() const { return int(members_.size()); }
  /// The `i`-th member after this rank, so that not all turn to the same one first.
  int place_after(int i) const { return (index_ + i) % num_members(); }
  int member_after(int i) const { return members_[size_t(place_after(i))]; }

  Segment segment_;
  const int rank_;
  const std::vector<int> members_;
  const int index_;  // of this rank among them
  PhaseSync sync_;
  PeerMemory memory_;
  uint64_t sequence_ = 0;
  uint64_t num_steps_ = 0;
};

}  // namespace serried::shm
