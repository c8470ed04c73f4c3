// Finds the context of a group, and follows backwards to their end.
#include "serried/parallel/fsdp/context.h"

#include <algorithm>
#include <mutex>
#include <unordered_map>

#include "serried/tensor/making/backward_end.h"
#include "serried/parallel/fsdp/block.h"

namespace serried::detail {

std::shared_ptr<ShardContext> ShardContext::of(const Group& group) {
  // Ranks may be threads of one process, each with a group object of its own.
  static std::mutex mutex;
  static std::unordered_map<const void*, std::weak_ptr<ShardContext>> contexts;
  const std::lock_guard<std::mutex> lock(mutex);
  std::erase_if(contexts, [](const auto& entry) { return entry.second.expired(); });
  std::weak_ptr<ShardContext>& known = contexts[group.get()];
  std::shared_ptr<ShardContext> context = known.lock();
  if (context) return context;
  context = std::make_shared<ShardContext>(group);
  known = context;
  return context;
}

int64_t ShardContext::add(Block& block) {
  blocks_.push_back(&block);
  return num_added_++;
}

void ShardContext::remove(const Block& block) {
  std::erase(blocks_, &block);
}

std::string ShardContext::text_of(int64_t number) const {
  for (const Block* block : blocks_) {
    if (block->number() == number) return block->text();
  }
  return "block " + std::to_string(number);
}

void ShardContext::make_room(const Block& next) {
  for (Block* block : blocks_) {
    if (block != &next && block->setting().reshard_after_forward) block->release();
  }
}

void ShardContext::watch_backward() {
  const int task = torch::autograd::get_current_graph_task_id();
  if (task < 0 || std::find(watched_.begin(), watched_.end(), task) != watched_.end()) return;
  watched_.push_back(task);
  when_backward_ends([self = weak_from_this(), task](bool completed) {
    if (const auto context = self.lock()) context->end_backward(task, completed);
  });
}

void ShardContext::release_all() {
  for (Block* block : blocks_) {
    if (block->setting().reshard_after_backward) block->release();
  }
}

void ShardContext::end_backward(int task, bool completed) {
  std::erase(watched_, task);
  const std::vector<Block*> blocks = blocks_;
  try {
    for (Block* block : blocks) block->end_backward(task, completed);
  } catch (...) {
    for (Block* block : blocks) block->end_backward(task, false);
    release_all();
    throw;
  }
  release_all();
}

}  // namespace serried::detail
