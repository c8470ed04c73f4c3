// Hashes of the blocks of a file, taken from its bytes as they go by.
#pragma once

#include <cstdint>
#include <map>
#include <memory>

namespace serried::checkpoint::detail {

/// XXH3 of a piece of memory: against accidents, not against attackers.
uint64_t hash_of(const void* data, int64_t size);

/// How a file is cut: blocks of equal length, the last one shorter.
struct BlockGrid {
  int64_t file_bytes = 0;
  int64_t block_bytes = 0;
  int64_t num_blocks() const { return file_bytes / block_bytes + (file_bytes % block_bytes != 0); }
  int64_t begin(int64_t block) const { return block * block_bytes; }
  int64_t end(int64_t block) const {
    const int64_t end = (block + 1) * block_bytes;
    return end < file_bytes ? end : file_bytes;
  }
};

/// Sees some bytes of a file, in ascending order, and hashes the blocks of which it sees every byte.
class BlockHasher {
 public:
  explicit BlockHasher(const BlockGrid& grid);
  ~BlockHasher();
  BlockHasher(BlockHasher&&) noexcept;

  void see(int64_t offset, const void* data, int64_t size);
  /// By number of block; only those that were seen whole.
  const std::map<int64_t, uint64_t>& hashes() const { return hashes_; }

 private:
  void see_in_block(int64_t block, int64_t offset, const char* data, int64_t size);

  struct State;
  BlockGrid grid_;
  std::unique_ptr<State> state_;
  int64_t expected_ = -1;  // the next byte of the block under way; -1: none is
  std::map<int64_t, uint64_t> hashes_;
};

}  // namespace serried::checkpoint::detail
