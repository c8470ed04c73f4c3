// Reading memory that a peer did not put into the segment.
#pragma once

#include "serried/comm/backends/shm/segment.h"

#include <cstdint>
#include <vector>

namespace serried::shm {

/// Where a tensor lies, as a peer must know it: an offset into its rank's heap, or an address of its process.
struct Location {
  static constexpr uint64_t kHeapBit = uint64_t(1) << 62;  // no user address of Linux has it
};

/// How ranks get at each other's tensors. `best` finds out; the others are for tests, and for hosts where the best is
/// not allowed: `attach` as between processes, `stage` with copies through the segment only.
enum class Reach { best, attach, stage };

class PeerMemory {
 public:
  PeerMemory(const Segment& segment, int rank, Reach reach) : segment_(segment), rank_(rank), reach_(reach) {}

  /// After all ranks have published their pids: tries one read from each peer.
  void probe();

  /// All ranks are threads of this process: every address is good everywhere.
  bool one_process() const { return one_process_; }

  /// Peers can read this rank's private memory. Agreed: all ranks see the same.
  bool readable() const { return one_process_ || cross_attach_; }
  void set_cross_attach(bool allowed) { cross_attach_ = allowed; }
  bool can_attach() const { return can_attach_; }

  uint64_t locate(const void* data) const;

  /// Whether peers can use the location as an address of their own, without a system call.
  bool addressable(uint64_t location) const { return one_process_ || (location & Location::kHeapBit) != 0; }
  char* resolve(int peer, uint64_t location) const;

  /// Copies from a peer. False if the peer's memory cannot be read any more: it died.
  bool read(int peer, uint64_t location, int64_t offset, char* to, int64_t bytes) const;

 private:
  const Segment& segment_;
  const int rank_;
  const Reach reach_;
  bool one_process_ = false;
  bool can_attach_ = false;
  bool cross_attach_ = false;
};

}  // namespace serried::shm
