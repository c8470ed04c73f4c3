// Heap offsets, addresses of one process, and cross-memory attach (process_vm_readv).
#include "serried/comm/backends/shm/peer_memory.h"

#include <sys/uio.h>
#include <unistd.h>

#include <cstring>

namespace serried::shm {

void PeerMemory::probe() {
  one_process_ = reach_ == Reach::best;
  can_attach_ = reach_ != Reach::stage;
  for (int peer = 0; peer < segment_.world_size(); ++peer) {
    const int pid = segment_.info(peer).pid.load();
    if (pid == getpid()) continue;
    one_process_ = false;
    char byte = 0;
    iovec local{.iov_base = &byte, .iov_len = 1};
    iovec remote{.iov_base = reinterpret_cast<void*>(segment_.info(peer).mapped_at.load()), .iov_len = 1};
    if (process_vm_readv(pid, &local, 1, &remote, 1, 0) != 1) can_attach_ = false;
  }
}

uint64_t PeerMemory::locate(const void* data) const {
  const char* heap = segment_.heap(rank_);
  const char* address = static_cast<const char*>(data);
  if (address >= heap && address < heap + segment_.heap_bytes()) return Location::kHeapBit | uint64_t(address - heap);
  return reinterpret_cast<uint64_t>(address);
}

char* PeerMemory::resolve(int peer, uint64_t location) const {
  if ((location & Location::kHeapBit) != 0) return segment_.heap(peer) + (location & ~Location::kHeapBit);
  return reinterpret_cast<char*>(location);
}

bool PeerMemory::read(int peer, uint64_t location, int64_t offset, char* to, int64_t bytes) const {
  if (addressable(location)) {
    std::memcpy(to, resolve(peer, location) + offset, bytes);
    return true;
  }
  const int pid = segment_.info(peer).pid.load(std::memory_order_relaxed);
  const char* from = reinterpret_cast<const char*>(location) + offset;
  while (bytes > 0) {
    iovec local{.iov_base = to, .iov_len = size_t(bytes)};
    iovec remote{.iov_base = const_cast<char*>(from), .iov_len = size_t(bytes)};
    const ssize_t copied = process_vm_readv(pid, &local, 1, &remote, 1, 0);
    if (copied <= 0) return false;
    to += copied;
    from += copied;
    bytes -= copied;
  }
  return true;
}

}  // namespace serried::shm
