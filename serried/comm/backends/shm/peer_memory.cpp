// Heap offsets, and addresses of one process.
#include "serried/comm/backends/shm/peer_memory.h"

namespace serried::shm {

uint64_t PeerMemory::locate(const void* data) const {
  const char* heap = segment_.heap(rank_);
  const char* address = static_cast<const char*>(data);
  if (address >= heap && address < heap + segment_.heap_bytes()) return kHeapBit | uint64_t(address - heap);
  return reinterpret_cast<uint64_t>(address);
}

char* PeerMemory::resolve(int peer, uint64_t location, int64_t bytes) const {
  if ((location & kHeapBit) == 0) return one_process_ ? reinterpret_cast<char*>(location) : nullptr;
  const uint64_t offset = location & ~kHeapBit;
  const uint64_t room = uint64_t(segment_.heap_bytes());
  if (offset > room || uint64_t(bytes) > room - offset) return nullptr;
  return segment_.heap(peer) + offset;
}

}  // namespace serried::shm
