// Heap offsets, and addresses of one process.
#include "serried/comm/backends/shm/peer_memory.h"

#include <unistd.h>

namespace serried::shm {

void PeerMemory::look_around() {
  one_process_ = !always_stage_;
  for (int peer = 0; peer < segment_.world_size(); ++peer) one_process_ &= segment_.info(peer).pid.load() == getpid();
}

uint64_t PeerMemory::locate(const void* data) const {
  const char* heap = segment_.heap(rank_);
  const char* address = static_cast<const char*>(data);
  if (address >= heap && address < heap + segment_.heap_bytes()) return kHeapBit | uint64_t(address - heap);
  return reinterpret_cast<uint64_t>(address);
}

char* PeerMemory::resolve(int peer, uint64_t location) const {
  if ((location & kHeapBit) != 0) return segment_.heap(peer) + (location & ~kHeapBit);
  return reinterpret_cast<char*>(location);
}

}  // namespace serried::shm
