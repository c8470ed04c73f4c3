// First fit with merging of neighbours.
#include "serried/comm/backends/shm/heap.h"

#include <algorithm>
#include <iterator>

namespace serried::shm {
namespace {

// CPU kernels may assume that tensors start at a cache line, as ATen's own do.
constexpr int64_t kAlignment = 64;

}  // namespace

Heap::Heap(int64_t bytes) {
  if (bytes > 0) free_.emplace(0, bytes);
}

int64_t Heap::allocate(int64_t bytes) {
  const int64_t size = std::max<int64_t>((bytes + kAlignment - 1) / kAlignment, 1) * kAlignment;
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto block = free_.begin(); block != free_.end(); ++block) {
    if (block->second < size) continue;
    const auto [offset, available] = *block;
    free_.erase(block);
    if (available > size) free_.emplace(offset + size, available - size);
    used_.emplace(offset, size);
    return offset;
  }
  return -1;
}

void Heap::release(int64_t offset) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto block = used_.extract(offset);
  if (block.empty()) return;
  auto freed = free_.insert(std::move(block)).position;
  const auto next = std::next(freed);
  if (next != free_.end() && freed->first + freed->second == next->first) {
    freed->second += next->second;
    free_.erase(next);
  }
  if (freed == free_.begin()) return;
  const auto previous = std::prev(freed);
  if (previous->first + previous->second != freed->first) return;
  previous->second += freed->second;
  free_.erase(freed);
}

int64_t Heap::bytes_in_use() const {
  std::lock_guard<std::mutex> lock(mutex_);
  int64_t total = 0;
  for (const auto& [offset, bytes] : used_) total += bytes;
  return total;
}

}  // namespace serried::shm
