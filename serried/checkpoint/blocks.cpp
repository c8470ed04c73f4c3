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

uint64_t hash_of_leaves(const std::vector<uint64_t>& leaves) {
  return leaves.size() == 1 ? leaves[0] : hash_of(leaves.data(), int64_t(leaves.size() * sizeof(uint64_t)));
}

uint64_t hash_of_block(const BlockGrid& grid, int64_t block, const void* data) {
  const auto* bytes = static_cast<const char*>(data);
  std::vector<uint64_t> leaves(size_t(grid.num_leaves(block)));
  for (int64_t leaf = 0; leaf < int64_t(leaves.size()); ++leaf) {
    const int64_t begin = grid.leaf_begin(block, leaf);
    leaves[size_t(leaf)] = hash_of(bytes + (begin - grid.begin(block)), grid.leaf_end(block, leaf) - begin);
  }
  return hash_of_leaves(leaves);
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

BlockPart BlockHasher::part(int64_t block) const {
  const auto found = parts_.find(block);
  return found == parts_.end() ? BlockPart(grid_.num_leaves(block)) : found->second;
}

void BlockHasher::see_in_block(int64_t block, int64_t offset, const char* data, int64_t size) {
  if (offset == grid_.begin(block) && size == grid_.end(block) - offset) {
    expected_ = -1;
    hashes_[block] = hash_of_block(grid_, block, data);
    parts_.erase(block);
    return;
  }
  BlockPart& part = parts_.try_emplace(block, grid_.num_leaves(block)).first->second;
  for (const int64_t end = offset + size; offset < end;) {
    const int64_t leaf = (offset - grid_.begin(block)) / grid_.leaf_bytes, leaf_end = grid_.leaf_end(block, leaf);
    const int64_t count = std::min(end, leaf_end) - offset;
    uint64_t hash = 0;
    if (see_in_leaf(grid_.leaf_begin(block, leaf), leaf_end, offset, data, count, hash)) part.note(leaf, hash);
    offset += count;
    data += count;
  }
  if (!part.is_whole()) return;
  hashes_[block] = hash_of_leaves(part.hashes());
  parts_.erase(block);
}

// Whether it ends the leaf, all of which was seen.
bool BlockHasher::see_in_leaf(int64_t begin, int64_t end, int64_t offset, const char* data, int64_t size,
                              uint64_t& hash) {
  if (offset == begin && size == end - begin) {
    expected_ = -1;
    hash = hash_of(data, size);
    return true;
  }
  if (offset == begin) {
    XXH3_64bits_reset(&state_->hash);
  } else if (offset != expected_) {
    expected_ = -1;
    return false;
  }
  XXH3_64bits_update(&state_->hash, data, size_t(size));
  expected_ = offset + size;
  if (expected_ != end) return false;
  hash = XXH3_64bits_digest(&state_->hash);
  expected_ = -1;
  return true;
}

}  // namespace serried::checkpoint::detail
