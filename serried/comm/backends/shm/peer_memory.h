// Where a tensor lies, and how a peer gets there.
#pragma once

#include "serried/comm/backends/shm/segment.h"

#include <cstdint>

namespace serried::shm {

/// Locations are what a rank tells its peers about memory: an offset into its heap, or an address of its process.
///
/// Reading the private memory of another process (process_vm_readv) is not among the ways: copying through the segment
/// in small rounds, so that both sides work at once, was faster for almost every collective and size, and asks for no
/// permission. docs/performance.md has the numbers.
class PeerMemory {
 public:
  PeerMemory(const Segment& segment, int rank, bool always_stage)
      : segment_(segment), rank_(rank), always_stage_(always_stage) {}

  /// After all ranks have published their pids.
  void look_around();

  uint64_t locate(const void* data) const;

  /// Whether every peer can use the location. All ranks see the same.
  bool reachable(uint64_t location) const { return one_process_ || (location & kHeapBit) != 0; }

  /// The location of `peer`'s memory as an address of this process.
  char* resolve(int peer, uint64_t location) const;

 private:
  static constexpr uint64_t kHeapBit = uint64_t(1) << 62;  // no user address of Linux has it

  const Segment& segment_;
  const int rank_;
  const bool always_stage_;
  bool one_process_ = false;  // all ranks are threads: every address is good everywhere
};

}  // namespace serried::shm
