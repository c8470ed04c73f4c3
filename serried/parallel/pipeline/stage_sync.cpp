// no_sync of both kinds, held by the step.
#include "serried/parallel/pipeline/stage_sync.h"

#include <algorithm>

#include "serried/parallel/fsdp/block.h"

namespace serried::detail {

StageSync::StageSync(const std::shared_ptr<torch::nn::Module>& module) {
  for (const auto& each : module->modules(/*include_self=*/false)) {
    if (auto* wrapper = dynamic_cast<DataParallelBase*>(each.get())) wrappers_.push_back(wrapper);
  }
  if (auto* wrapper = dynamic_cast<DataParallelBase*>(module.get())) wrappers_.push_back(wrapper);
  for (const at::Tensor& parameter : module->parameters()) {
    const std::shared_ptr<Block> block = block_of(parameter);
    if (block && std::find(blocks_.begin(), blocks_.end(), block) == blocks_.end()) blocks_.push_back(block);
  }
}

void StageSync::begin(bool unshards) {
  unshards_ = unshards;
  blocks_keep_ = std::make_unique<FullyShardNoSync>(blocks_, true);
  if (unshards_) unshard();
}

// Where a gather may overlap it does so with the wait for the stage's first message.
void StageSync::unshard() const {
  for (const auto& block : blocks_) block->unshard(/*async=*/block->overlaps());
}

void StageSync::reshard() const {
  for (const auto& block : blocks_) block->reshard();
}

void StageSync::end() {
  blocks_keep_.reset();
  if (std::exchange(unshards_, false)) reshard();
}

StageSync::Scope::Scope(const StageSync& sync, bool is_last) {
  for (DataParallelBase* wrapper : sync.wrappers_) {
    if (!is_last) keep_.push_back(wrapper->no_sync());
  }
}

}  // namespace serried::detail
