// The memory that the ranks of one host share: an anonymous file, so nothing is left behind when ranks die.
#pragma once

#include "serried/base/watch_page.h"
#include "serried/comm/agree/shared_memory.h"
#include "serried/comm/collectives/watch.h"

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace serried::shm {

/// What a rank lays out for its peers at the start of a collective. Two of them and the phase fill one cache line.
struct Offer {
  uint32_t fingerprint;
  uint32_t flags;
  uint64_t address;  // where the peers find it; see Location
  uint64_t extent;   // bytes of a piece, or the address of the output of an all_reduce
};

/// What an Offer says about itself.
enum OfferFlag : uint32_t {
  kInSlot = 1,      // the bytes lie in the rank's slot; `address` is unused
  kInPlace = 2,     // the bytes lie where `address` says: the rank must not go on before all have read
  kInStage = 4,     // the bytes come chunk by chunk through the stage
  kOnePerPeer = 8,  // peer p takes the p-th run of `extent` bytes
  kInTable = 16,    // each peer's piece is in the rank's table
};

/// A copy that holds still, of an offer that its rank may be rewriting.
inline Offer read_once(Offer& shared) {
  const auto read = [](auto& field) { return std::atomic_ref(field).load(std::memory_order_relaxed); };
  return {.fingerprint = read(shared.fingerprint),
          .flags = read(shared.flags),
          .address = read(shared.address),
          .extent = read(shared.extent)};
}

/// How far a rank has come. `phase` only grows, and every rank of the group runs through the same phases.
struct alignas(128) RankLine {
  std::atomic<uint32_t> phase;
  std::atomic<uint32_t> waiters;
  std::array<Offer, 2> offers;  // of even and odd collectives: a peer may still read the last one
};

/// Read by peers only when something has gone wrong, and by `serried top`.
struct alignas(128) RankInfo {
  watch_page::RankPage page;
  std::atomic<uint32_t> visits;  // the rank is in the memory of its peers; see Visit
  std::array<watch::Record, 2> records;
};

struct Header {
  watch_page::Header page;
  std::atomic<uint32_t> aborted;  // sticky; set by the first rank that gives up
  std::atomic<uint32_t> reason_taken;
  std::atomic<uint32_t> reason_ready;
  std::atomic<uint32_t> by_loss;  // the reason is that a rank died or left
  char reason[2048];
};

struct Piece {
  char* data = nullptr;
  int64_t bytes = 0;
};

inline Piece read_once(Piece& shared) {
  return {.data = std::atomic_ref(shared.data).load(std::memory_order_relaxed),
          .bytes = std::atomic_ref(shared.bytes).load(std::memory_order_relaxed)};
}

/// One direction between two ranks: a byte stream of messages. `written` and `read` only grow.
struct Ring {
  alignas(128) std::atomic<uint64_t> written;
  alignas(128) std::atomic<uint64_t> read;
  alignas(128) char data[1];

  static constexpr uint64_t kCapacity = 128 << 10;
};

/// Somebody wrote to, or read from, a ring of this rank.
struct alignas(128) Bell {
  std::atomic<uint32_t> rings;
  std::atomic<uint32_t> waiters;
};

/// How many bytes of each kind a segment holds per rank.
struct SegmentShape {
  int world_size = 1;
  int64_t heap_bytes = 0;
  int64_t round_bytes = 64 << 10;  // how much of the stage is handed over at a time, at most kStageBytes
  int64_t arrival_bytes = 0;       // for what ranks of other hosts tell the ranks of this one

  static constexpr int64_t kSlotBytes = 64 << 10;    // small messages
  static constexpr int64_t kStageBytes = 256 << 10;  // one chunk of a large one

  /// What is wrong with a shape that another rank names; empty if nothing is.
  std::string problem() const;
};

class Segment {
 public:
  /// Makes the memory; `place()` is to be told to the peers.
  static Segment create(const SegmentShape& shape);

  /// Maps the memory that rank 0 keeps at `place`, after a look at what it is.
  static Segment attach(const SegmentShape& shape, const detail::SharedFilePlace& place);

  detail::SharedFilePlace place() const { return memory_.place(); }

  /// The mapping stays; nobody can attach through this process any more.
  void close_file() { memory_.close_file(); }

  int world_size() const { return shape_.world_size; }
  int64_t round_bytes() const { return shape_.round_bytes; }
  Header& header() const { return *reinterpret_cast<Header*>(base_); }
  RankLine& line(int rank) const { return reinterpret_cast<RankLine*>(base_ + offsets_.lines)[rank]; }
  RankInfo& info(int rank) const { return reinterpret_cast<RankInfo*>(base_ + offsets_.infos)[rank]; }
  Bell& bell(int rank) const { return reinterpret_cast<Bell*>(base_ + offsets_.bells)[rank]; }
  Piece* table(int rank, int parity) const {
    return reinterpret_cast<Piece*>(base_ + offsets_.tables) + (2 * rank + parity) * shape_.world_size;
  }
  Ring& ring(int from, int to) const {
    return *reinterpret_cast<Ring*>(base_ + offsets_.rings + (from * shape_.world_size + to) * offsets_.ring_stride);
  }
  char* slot(int rank, int parity) const {
    return base_ + offsets_.ranks + rank * offsets_.rank_stride + parity * SegmentShape::kSlotBytes;
  }
  char* arrival(int rank, int parity) const {
    return base_ + offsets_.arrivals + (2 * rank + parity) * shape_.arrival_bytes;
  }
  char* stage(int rank, int parity) const { return slot(rank, 2) + parity * SegmentShape::kStageBytes; }
  char* result(int rank) const { return stage(rank, 2); }
  char* heap(int rank) const { return base_ + offsets_.heaps + rank * shape_.heap_bytes; }
  int64_t heap_bytes() const { return shape_.heap_bytes; }

 private:
  struct Offsets {
    int64_t lines, infos, bells, tables, rings, ring_stride, arrivals, ranks, rank_stride, heaps, total;
  };
  static Offsets lay_out(const SegmentShape& shape);
  explicit Segment(const SegmentShape& shape) : shape_(shape), offsets_(lay_out(shape)) {}
  void use_memory();
  void describe_layout();

  SegmentShape shape_;
  Offsets offsets_;
  detail::SharedMemory memory_;
  char* base_ = nullptr;
};

/// Locations are what a rank tells its peers about memory: an offset into its heap, or an address of its process.
///
/// Reading the private memory of another process (process_vm_readv) is not among the ways: copying through the segment
/// in small rounds, so that both sides work at once, was faster for almost every collective and size, and asks for no
/// permission. docs/performance.md has the numbers.
class PeerMemory {
 public:
  /// `one_process`: all ranks are threads, so that an address of one is good for all. Elsewhere peers reach each
  /// other's heaps and nothing else, whatever a location says.
  PeerMemory(const Segment& segment, int rank, bool one_process)
      : segment_(segment), rank_(rank), one_process_(one_process) {}

  bool one_process() const { return one_process_; }

  uint64_t locate(const void* data) const;

  /// Whether every peer can use the location. All ranks see the same.
  bool reachable(uint64_t location) const { return one_process_ || (location & kHeapBit) != 0; }

  /// `bytes` of `peer`'s memory as an address of this process; null where they do not lie in its heap.
  char* resolve(int peer, uint64_t location, int64_t bytes) const;

 private:
  static constexpr uint64_t kHeapBit = uint64_t(1) << 62;  // no user address of Linux has it

  const Segment& segment_;
  const int rank_;
  const bool one_process_;
};

}  // namespace serried::shm
