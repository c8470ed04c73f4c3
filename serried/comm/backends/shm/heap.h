// Which parts of this rank's share of the symmetric heap are free.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>

namespace serried::shm {

/// First fit over [0, bytes). Own code: the memory is mapped at a different address in every process, and no allocator
/// of LibTorch takes a foreign region. Thread-safe.
class Heap {
 public:
  explicit Heap(int64_t bytes);

  /// Offset of a block, aligned for ATen's kernels; -1 if none is large enough.
  int64_t allocate(int64_t bytes);
  void release(int64_t offset);
  int64_t bytes_in_use() const;

 private:
  mutable std::mutex mutex_;
  std::map<int64_t, int64_t> free_;  // offset -> bytes, never adjacent
  std::map<int64_t, int64_t> used_;
};

}  // namespace serried::shm
