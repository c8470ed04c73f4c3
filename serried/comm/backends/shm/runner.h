// What runs the collectives of one rank, in the memory of one host or between hosts, and what a collective is to it.
#pragma once

#include "serried/comm/backends/shm/far_mail.h"
#include "serried/comm/backends/shm/phase_sync.h"
#include "serried/comm/backends/shm/reduce_kernels.h"

#include <string>
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

/// Of reductions over hosts: what is done of one on this host.
struct HostPart {
  PartialReduction reduction = {};
  const char* before = nullptr;  // what the hosts before make of this rank's part
  int num_ranks = 0;             // of all hosts, where this is the last of them
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
  HostPart part;  // of reduce_pieces: instead of the kernel
  int64_t element_bytes = 1;
  int64_t count = 0;  // elements of input, or of this rank's result

  // set by arrive
  uint32_t arrival = 0;
  int parity = 0;
};

/// One thread at a time, except for what says so.
class Runner {
 public:
  virtual ~Runner() = default;

  /// Lays out this rank's part and tells the peers. Never blocks; raises if the group is unusable.
  virtual void arrive(Op& op) = 0;

  /// Whether `complete` would find every peer there. Never blocks.
  virtual bool all_have_arrived(const Op& op) = 0;

  /// Blocks until this rank may use its outputs and reuse its inputs. Raises on mismatch, death of a peer, timeout;
  /// also then no thread of this process uses them any more.
  virtual void complete(Op& op) = 0;

  /// Makes the group unusable for all ranks, with `why` as the reason they name. Any thread may call.
  virtual void abort(const std::string& why, PhaseSync::Cause cause = PhaseSync::Cause::failure) = 0;

  /// This rank closes the group in order.
  virtual void leave() = 0;

  virtual int rank() const = 0;
  virtual int world_size() const = 0;
  /// The number of the newest collective.
  virtual uint64_t sequence() const = 0;
  /// What the ranks of this host share.
  virtual const Segment& segment() const = 0;
  virtual PhaseSync& sync() = 0;
  /// Null where all ranks share the segment.
  virtual FarMail* far_mail() { return nullptr; }
};

}  // namespace serried::shm
