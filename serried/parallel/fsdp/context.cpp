// Finds the context of a group, follows passes by the blocks they use, and backwards to their end.
#include "serried/parallel/fsdp/context.h"

#include <algorithm>
#include <mutex>
#include <unordered_map>

#include "serried/parallel/fsdp/block.h"
#include "serried/tape/recorder.h"
#include "serried/tensor/making/backward_end.h"

namespace serried::detail {
namespace {

// Blocks that stay whole are passed over, but not for ever.
constexpr size_t kLookAhead = 4;
constexpr size_t kGradientBuffers = 2;

Pass current_pass() {
  if (torch::autograd::get_current_graph_task_id() >= 0) return Pass::backward;
  return at::GradMode::is_enabled() ? Pass::forward : Pass::without_gradient;
}

}  // namespace

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
  std::erase_if(reductions_, [&](const StartedReduction& each) { return each.block == &block; });
  if (last_ == &block) last_ = nullptr;
}

Block* ShardContext::find(int64_t number) const {
  const auto found =
      std::find_if(blocks_.begin(), blocks_.end(), [&](const Block* b) { return b->number() == number; });
  return found != blocks_.end() ? *found : nullptr;
}

std::string ShardContext::text_of(int64_t number) const {
  const Block* block = find(number);
  return block != nullptr ? block->text() : "block " + std::to_string(number);
}

void ShardContext::make_room(const Block& next, bool came_ahead) {
  for (Block* block : blocks_) {
    if (block == &next || !block->setting().reshard_after_forward) continue;
    if (block->is_on_its_way() && (came_ahead || block->is_asked_for())) continue;
    block->release();
  }
}

bool ShardContext::note(const Block& block) {
  if (tape::is_replayed()) return false;
  const Pass pass = current_pass();
  if (last_ == &block && last_pass_ == pass) return false;
  last_ = &block;
  last_pass_ = pass;
  // No backward tells when a pass without gradients is over.
  order_of(pass).note(block.number(), /*begins_anew=*/pass == Pass::without_gradient);
  return true;
}

void ShardContext::gather_ahead_of(const Block& used) {
  const bool is_backward = last_pass_ == Pass::backward;
  const auto& asked = is_backward ? used.setting().next_in_backward : used.setting().next_in_forward;
  for (const std::weak_ptr<Block>& each : asked) {
    if (const std::shared_ptr<Block> next = each.lock()) next->gather_ahead(/*asked_for=*/true);
  }
  // Nobody waits for what a pass without gradients did not use after all, and the next recording would meet it.
  if (!asked.empty() || !used.overlaps() || last_pass_ == Pass::without_gradient) return;
  const auto expected = order_of(last_pass_).expected();
  for (const int64_t number : expected.slice(0, std::min(kLookAhead, expected.size()))) {
    Block* next = find(number);
    // One at a time: the memory of two blocks is all that is taken.
    if (next == nullptr || next->is_on_its_way() || !next->overlaps()) return;
    if (next->is_gathered()) continue;
    return next->gather_ahead(/*asked_for=*/false);
  }
}

void ShardContext::settle_oldest() {
  const StartedReduction oldest = reductions_.front();
  reductions_.pop_front();
  oldest.block->settle(oldest.task);
}

void ShardContext::make_room_for_gradients() {
  while (!reductions_.empty() && gradients.num_taken() >= kGradientBuffers) settle_oldest();
}

void ShardContext::settle(int task) {
  const auto is_of_task = [&](const StartedReduction& each) { return each.task == task; };
  while (std::any_of(reductions_.begin(), reductions_.end(), is_of_task)) settle_oldest();
}

void ShardContext::watch_backward() {
  const int task = torch::autograd::get_current_graph_task_id();
  if (task < 0 || std::find(watched_.begin(), watched_.end(), task) != watched_.end()) return;
  if (watched_.empty()) order_of(Pass::forward).end_pass();
  watched_.push_back(task);
  when_backward_ends([self = weak_from_this(), task](bool completed) {
    if (const auto context = self.lock()) context->end_backward(task, completed);
  });
}

void ShardContext::release_all(bool completed) {
  for (Block* block : blocks_) {
    if (!block->setting().reshard_after_backward) continue;
    try {
      // Peers still read the parts that an optimizer writes next.
      if (completed) block->arrive();
    } catch (...) {  // NOLINT: nobody needed it; who needs the group next is told
    }
    block->release();
  }
}

void ShardContext::end_backward(int task, bool completed) {
  std::erase(watched_, task);
  if (watched_.empty()) {
    order_of(Pass::backward).end_pass(completed);
    last_ = nullptr;
  }
  const std::vector<Block*> blocks = blocks_;
  try {
    for (Block* block : blocks) block->end_backward(task, completed);
    if (completed) settle(task);
  } catch (...) {
    for (Block* block : blocks) block->end_backward(task, false);
    std::erase_if(reductions_, [&](const StartedReduction& each) { return each.task == task; });
    release_all(false);
    throw;
  }
  std::erase_if(reductions_, [&](const StartedReduction& each) { return each.task == task; });
  release_all(completed);
}

}  // namespace serried::detail
