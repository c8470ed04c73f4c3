// XXH3, whole or piece by piece.
#include "serried/checkpoint/blocks.h"

#include <algorithm>

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace serried::checkpoint::detail {

struct BlockHasher::State {
  XXH3_state_t hash;
};

uint64_t hash_of(const void* data, int64_t size) {
  return XXH3_64bits(data, size_t(size));
}

BlockHasher::BlockHasher(const BlockGrid& grid) : grid_(grid), state_(std::make_unique<State>()) {}
BlockHasher::~BlockHasher() = default;
BlockHasher::BlockHasher(BlockHasher&&) noexcept = default;

void BlockHasher::see(int64_t offset, const void* data, int64_t size) {
  const auto* bytes = static_cast<const char*>(data);
  while (size > 0) {
    const int64_t block = offset / grid_.block_bytes;
    const int64_t count = std::min(size, grid_.end(block) - offset);
    if (count <= 0) return;
    see_in_block(block, offset, bytes, count);
    offset += count;
    bytes += count;
    size -= count;
  }
}

void BlockHasher::see_in_block(int64_t block, int64_t offset, const char* data, int64_t size) {
  const int64_t begin = grid_.begin(block), end = grid_.end(block);
  if (offset == begin && size == end - begin) {
    expected_ = -1;
    hashes_[block] = hash_of(data, size);
    return;
  }
  if (offset == begin) {
    XXH3_64bits_reset(&state_->hash);
  } else if (offset != expected_) {
    expected_ = -1;
    return;
  }
  XXH3_64bits_update(&state_->hash, data, size_t(size));
  expected_ = offset + size;
  if (expected_ != end) return;
  hashes_[block] = XXH3_64bits_digest(&state_->hash);
  expected_ = -1;
}

}  // namespace serried::checkpoint::detail
