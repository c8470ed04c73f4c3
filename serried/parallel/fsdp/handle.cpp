// The handle: what users change about blocks that are there.
#include "serried/base/error.h"
#include "serried/parallel/fsdp/block.h"
#include "serried/parallel/fsdp/fully_shard.h"

namespace serried {

FullyShardNoSync::FullyShardNoSync(std::vector<std::shared_ptr<detail::Block>> blocks, bool enabled) {
  if (!enabled) return;
  for (std::shared_ptr<detail::Block>& block : blocks) {
    if (!block->setting().reduces) continue;
    block->rely_on_settings();
    block->setting().reduces = false;
    blocks_.push_back(std::move(block));
  }
}

FullyShardNoSync::~FullyShardNoSync() {
  for (const auto& block : blocks_) block->setting().reduces = true;
}

FullyShardHandle::FullyShardHandle(std::shared_ptr<detail::Block> own,
                                   std::vector<std::shared_ptr<detail::Block>> inside)
    : own_(std::move(own)), all_(std::move(inside)) {
  if (own_) all_.push_back(own_);
}

FullyShardNoSync FullyShardHandle::no_sync(bool enabled) const {
  return FullyShardNoSync(all_, enabled);
}

void UnshardHandle::wait() const {
  if (const auto block = block_.lock()) block->arrive();
}

UnshardHandle FullyShardHandle::unshard(UnshardOptions options) const {
  if (own_) own_->unshard(options.async);
  return UnshardHandle(own_);
}

void FullyShardHandle::reshard() const {
  if (own_) own_->reshard();
}

void FullyShardHandle::set_reshard_after_forward(bool reshard) const {
  for (const auto& block : all_) {
    block->setting().reshard_after_forward = reshard;
    block->setting().is_root = false;
  }
}

void FullyShardHandle::set_reshard_after_backward(bool reshard) const {
  for (const auto& block : all_) block->setting().reshard_after_backward = reshard;
}

void FullyShardHandle::set_requires_all_reduce(bool all_reduce) const {
  for (const auto& block : all_) block->setting().all_reduces = all_reduce;
}

void FullyShardHandle::set_requires_gradient_sync(bool reduce) const {
  for (const auto& block : all_) {
    block->rely_on_settings();
    block->setting().reduces = reduce;
  }
}

void FullyShardHandle::set_gradient_divide_factor(std::optional<double> factor) const {
  if (factor.has_value() && !(*factor > 0)) {
    raise<c10::ValueError>({"set_gradient_divide_factor", c10::str("the factor is ", *factor),
                            "pass a number above 0, or std::nullopt for the number of ranks"});
  }
  for (const auto& block : all_) block->setting().divide_factor = factor;
}

void FullyShardHandle::set_force_sum_reduction_for_comms(bool sum) const {
  for (const auto& block : all_) block->setting().sums = sum;
}

detail::BlockSetting& FullyShardHandle::own_setting(const char* where) const {
  if (own_) return own_->setting();
  raise<c10::ValueError>({where, "the module has no parameters of its own: all of them belong to blocks inside",
                          "call it on the handles of those blocks"});
}

void FullyShardHandle::set_custom_all_gather(AllGatherHook hook) const {
  detail::BlockSetting& setting = own_setting("set_custom_all_gather");
  setting.hooks.all_gather = std::move(hook);
  ++setting.num_hook_changes;
}

void FullyShardHandle::set_custom_reduce_scatter(ReduceScatterHook hook) const {
  detail::BlockSetting& setting = own_setting("set_custom_reduce_scatter");
  setting.hooks.reduce_scatter = std::move(hook);
  ++setting.num_hook_changes;
}

void FullyShardHandle::set_all_reduce_hook(ReducedGradientHook hook) const {
  detail::BlockSetting& setting = own_setting("set_all_reduce_hook");
  setting.hooks.reduced = std::move(hook);
  ++setting.num_hook_changes;
}

std::vector<std::weak_ptr<detail::Block>> FullyShardHandle::own_blocks(const char* where,
                                                                       const std::vector<FullyShardHandle>& handles) {
  std::vector<std::weak_ptr<detail::Block>> blocks;
  for (const FullyShardHandle& handle : handles) {
    handle.own_setting(where);
    blocks.push_back(handle.own_);
  }
  return blocks;
}

void FullyShardHandle::set_modules_to_forward_prefetch(const std::vector<FullyShardHandle>& next) const {
  constexpr const char* where = "set_modules_to_forward_prefetch";
  own_setting(where).next_in_forward = own_blocks(where, next);
}

void FullyShardHandle::set_modules_to_backward_prefetch(const std::vector<FullyShardHandle>& next) const {
  constexpr const char* where = "set_modules_to_backward_prefetch";
  own_setting(where).next_in_backward = own_blocks(where, next);
}

FullyShardUsage FullyShardHandle::usage() const {
  if (all_.empty()) return {};
  detail::ShardContext& context = all_.front()->context();
  const FullyShardUsage usage{.gathered_bytes = context.whole.bytes_taken(),
                              .peak_gathered_bytes = context.whole.peak_bytes(),
                              .gradient_bytes = context.gradients.bytes_taken(),
                              .peak_gradient_bytes = context.gradients.peak_bytes(),
                              .num_gathers = context.num_gathers,
                              .num_reductions = context.num_reductions};
  context.whole.reset_peak();
  context.gradients.reset_peak();
  return usage;
}

int64_t FullyShardHandle::whole_bytes() const {
  return own_ ? own_->whole_bytes() : 0;
}

}  // namespace serried
