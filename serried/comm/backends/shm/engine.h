// The collectives over one segment: each is "arrive", which never blocks, then "complete".
#pragma once

#include "serried/comm/backends/shm/phase_sync.h"
#include "serried/comm/backends/shm/reduce_kernels.h"

#include <c10/util/SmallVector.h>

#include <optional>
#include <vector>

namespace serried::shm {

/// One piece of memory per peer: `base` plus p strides, or a list. Stride 0: the same piece for everybody.
struct Pieces {
  char* base = nullptr;
  int64_t stride = 0;
  int64_t bytes = 0;
  std::vector<Piece> list;
  int only = -1;  // the single peer that has a piece; -1: all

  Piece at(int peer) const;
  int64_t largest(int num_peers) const;
};

/// One collective of one rank. The memory it names must live until it is complete.
struct Op {
  enum class Kind { all_reduce, exchange, reduce_pieces, barrier };

  Kind kind = Kind::barrier;
  watch::Record record;
  std::chrono::milliseconds timeout{};

  // all_reduce: output may be input
  const char* input = nullptr;
  char* output = nullptr;

  // exchange: offers[p] becomes p's sinks[this rank]. reduce_pieces: sinks.at(this rank) becomes the reduction of all
  // ranks' offers[this rank].
  Pieces offers;
  Pieces sinks;
  std::vector<int64_t> rows;  // of an exchange: a table (rows.h) by which what a peer offers is laid out in its sink

  // reductions
  ReduceKernel kernel = nullptr;
  int64_t element_bytes = 1;
  int64_t count = 0;  // elements of input, or of this rank's result

  // set by arrive
  uint32_t arrival = 0;
  int parity = 0;
};

class Engine {
 public:
  Engine(Segment segment, int rank, WaitPolicy policy, bool one_process);

  /// Waits until every rank has mapped the segment.
  /// `place` is where the ranks met before, for messages.
  void meet(std::chrono::milliseconds timeout, const std::string& place);

  /// Lays out this rank's part and tells the peers. Never blocks; raises if the group is unusable.
  void arrive(Op& op);

  /// Whether `complete` would find every peer there. Never blocks.
  bool all_have_arrived(const Op& op) const;

  /// Blocks until this rank may use its outputs and reuse its inputs. Raises on mismatch, death of a peer, timeout;
  /// also then no thread of this process uses them any more.
  void complete(Op& op);

  int rank() const { return rank_; }
  /// The number of the newest collective.
  uint64_t sequence() const { return sequence_; }
  int world_size() const { return segment_.world_size(); }
  const Segment& segment() const { return segment_; }
  PhaseSync& sync() { return sync_; }

 private:
  void publish(Op& op, uint32_t flags, uint64_t address, uint64_t extent);
  /// As it is now: a peer that is out of its mind may change it at any time, so each use works on one copy.
  Offer offer_of(int peer, const Op& op) const { return read_once(segment_.line(peer).offers[op.parity]); }
  void complete_kind(Op& op);
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

  Segment segment_;
  const int rank_;
  PhaseSync sync_;
  PeerMemory memory_;
  uint64_t sequence_ = 0;
};

}  // namespace serried::shm
