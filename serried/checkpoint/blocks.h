// Hashes of the blocks of a file, taken from its bytes as they go by.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

namespace serried::checkpoint::detail {

/// XXH3 of a piece of memory: against accidents, not against attackers.
uint64_t hash_of(const void* data, int64_t size);

/// How a file is cut: blocks of equal length, the last one shorter, and these into leaves in the same way.
struct BlockGrid {
  int64_t file_bytes = 0;
  int64_t block_bytes = 0;
  int64_t leaf_bytes = block_bytes;  // divides it
  int64_t num_blocks() const { return file_bytes / block_bytes + (file_bytes % block_bytes != 0); }
  int64_t begin(int64_t block) const { return block * block_bytes; }
  int64_t end(int64_t block) const {
    const int64_t end = (block + 1) * block_bytes;
    return end < file_bytes ? end : file_bytes;
  }
  int64_t num_leaves(int64_t block) const { return (end(block) - begin(block) + leaf_bytes - 1) / leaf_bytes; }
  int64_t leaf_begin(int64_t block, int64_t leaf) const { return begin(block) + leaf * leaf_bytes; }
  int64_t leaf_end(int64_t block, int64_t leaf) const {
    const int64_t next = leaf_begin(block, leaf + 1);
    return next < end(block) ? next : end(block);
  }
};

/// Of a block, from those of its leaves: ranks that read parts of it need not read it again to compare it.
uint64_t hash_of_leaves(const std::vector<uint64_t>& leaves);

/// The same from its bytes.
uint64_t hash_of_block(const BlockGrid& grid, int64_t block, const void* data);

/// What is known of a block: the hashes of some of its leaves.
class BlockPart {
 public:
  explicit BlockPart(int64_t num_leaves) : hashes_(size_t(num_leaves)), is_known_(size_t(num_leaves)) {}

  void note(int64_t leaf, uint64_t hash) {
    num_known_ += !is_known_[size_t(leaf)];
    is_known_[size_t(leaf)] = true;
    hashes_[size_t(leaf)] = hash;
  }
  bool knows(int64_t leaf) const { return is_known_[size_t(leaf)]; }
  bool is_whole() const { return num_known_ == int64_t(hashes_.size()); }
  int64_t num_leaves() const { return int64_t(hashes_.size()); }
  const std::vector<uint64_t>& hashes() const { return hashes_; }

 private:
  std::vector<uint64_t> hashes_;
  std::vector<bool> is_known_;
  int64_t num_known_ = 0;
};

/// Sees some bytes of a file and hashes the leaves of which it sees every byte, in ascending order.
class BlockHasher {
 public:
  explicit BlockHasher(const BlockGrid& grid);
  ~BlockHasher();
  BlockHasher(BlockHasher&&) noexcept;

  void see(int64_t offset, const void* data, int64_t size);
  /// By number of block; only those that were seen whole.
  const std::map<int64_t, uint64_t>& hashes() const { return hashes_; }
  /// What was seen of a block that was not seen whole.
  BlockPart part(int64_t block) const;

 private:
  void see_in_block(int64_t block, int64_t offset, const char* data, int64_t size);
  bool see_in_leaf(int64_t begin, int64_t end, int64_t offset, const char* data, int64_t size, uint64_t& hash);

  struct State;
  BlockGrid grid_;
  std::unique_ptr<State> state_;
  int64_t expected_ = -1;  // the next byte of the leaf under way; -1: none is
  std::map<int64_t, uint64_t> hashes_;
  std::map<int64_t, BlockPart> parts_;
};

}  // namespace serried::checkpoint::detail
