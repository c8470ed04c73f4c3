// The handle: what users change about blocks that are there.
#include "serried/base/error.h"
#include "serried/parallel/fsdp/block.h"
#include "serried/parallel/fsdp/fully_shard.h"

namespace serried {

FullyShardNoSync::FullyShardNoSync(std::vector<std::shared_ptr<detail::Block>> blocks, bool enabled) {
  if (!enabled) return;
  for (std::shared_ptr<detail::Block>& block : blocks) {
    if (!block->setting().reduces) continue;
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

void FullyShardHandle::unshard() const {
  if (own_) own_->unshard();
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

void FullyShardHandle::set_gradient_divide_factor(std::optional<double> factor) const {
  if (factor.has_value() && !(*factor > 0)) {
    raise<c10::ValueError>({"set_gradient_divide_factor", c10::str("the factor is ", *factor),
                            "pass a number above 0, or std::nullopt for the number of ranks"});
  }
  for (const auto& block : all_) block->setting().divide_factor = factor;
}

void FullyShardHandle::set_modules_to_forward_prefetch(const std::vector<FullyShardHandle>&) const {}

void FullyShardHandle::set_modules_to_backward_prefetch(const std::vector<FullyShardHandle>&) const {}

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
