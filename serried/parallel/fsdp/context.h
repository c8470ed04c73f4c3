// What the blocks of one group of ranks share on a rank: their memory, and the moments at which it is given back.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "serried/comm/groups/group.h"
#include "serried/parallel/fsdp/memory.h"

namespace serried::detail {

class Block;

/// One per rank and group, alive while a block is. Only the rank's own thread, or its backward, uses it.
class ShardContext : public std::enable_shared_from_this<ShardContext> {
 public:
  /// The one that blocks over `group` share.
  static std::shared_ptr<ShardContext> of(const Group& group);
  explicit ShardContext(const Group& group) : whole(nullptr), lowered(group), gradients(group) {}

  /// The block's number, which is the same on every rank.
  int64_t add(Block& block);
  void remove(const Block& block);
  const std::vector<Block*>& blocks() const { return blocks_; }
  /// For messages, also where the block is gone.
  std::string text_of(int64_t number) const;

  /// Before `next` is gathered: the whole values of others go.
  void make_room(const Block& next);
  /// Inside a backward: calls the blocks when it ends, and lets go of all whole values.
  void watch_backward();
  /// Whether all of them stay, because a recording or a user holds them, is the blocks' own question.
  void release_all();

  BufferPool whole;
  BufferPool lowered;  // shards in the dtype that ops compute in, while peers read them
  BufferPool gradients;
  int64_t num_gathers = 0;
  int64_t num_reductions = 0;

 private:
  void end_backward(int task, bool completed);

  std::vector<Block*> blocks_;
  int64_t num_added_ = 0;
  std::vector<int> watched_;  // graph tasks
};

}  // namespace serried::detail
