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
