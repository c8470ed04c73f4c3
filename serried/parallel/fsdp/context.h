// What the blocks of one group of ranks share on a rank: their memory, and the moments at which it is given back.
#pragma once

#include <array>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "serried/comm/groups/group.h"
#include "serried/parallel/fsdp/memory.h"
#include "serried/parallel/fsdp/order.h"

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

  /// Before `next` is gathered: the whole values of others go. `came_ahead`: it was on its way already, so that others
  /// that are may be used next.
  void make_room(const Block& next, bool came_ahead = false);
  /// An op needs `block`: whether another one was used before it in this pass.
  bool note(const Block& block);
  /// `used` is there: starts to gather what comes next.
  void gather_ahead_of(const Block& used);

  /// Before a block takes memory for gradients: others that are on their way make room.
  void make_room_for_gradients();
  /// The gradients of `block` are on their way, in the backward `task`.
  void add_reduction(Block& block, int task) { reductions_.push_back({&block, task}); }

  /// Inside a backward: calls the blocks when it ends, and lets go of all whole values.
  void watch_backward();

  BufferPool whole;
  BufferPool lowered;  // shards in the dtype that ops compute in, while peers read them
  BufferPool gradients;
  int64_t num_gathers = 0;
  int64_t num_reductions = 0;

 private:
  struct StartedReduction {
    Block* block = nullptr;
    int task = 0;
  };

  Block* find(int64_t number) const;
  Order& order_of(Pass pass) { return orders_[size_t(pass)]; }
  void settle_oldest();
  void settle(int task);
  void end_backward(int task, bool completed);
  /// Whether all of them stay, because a recording or a user holds them, is the blocks' own question.
  void release_all(bool completed);

  std::vector<Block*> blocks_;
  int64_t num_added_ = 0;
  std::vector<int> watched_;  // graph tasks
  std::deque<StartedReduction> reductions_;
  std::array<Order, 4> orders_;
  const Block* last_ = nullptr;  // used
  Pass last_pass_ = Pass::none;
};

}  // namespace serried::detail
