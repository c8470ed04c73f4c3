// How a stage meets its data-parallel ranks: once per step, however many micro-batches there are.
#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <vector>

#include "serried/parallel/ddp/ddp.h"
#include "serried/parallel/fsdp/fully_shard.h"

namespace serried::detail {

class StageSync {
 public:
  /// DistributedDataParallel: the module or some within. fully_shard: blocks of its parameters.
  explicit StageSync(const std::shared_ptr<torch::nn::Module>& module);

  /// Gradients stay on this rank from here on; parameters of blocks are gathered, unless a table says when.
  void begin(bool unshards);
  void unshard() const;
  void reshard() const;
  /// The next backward is the last one of the step, and averages gradients with all that has added up.
  void before_last_backward() { blocks_keep_.reset(); }
  /// After the last action, or after a failure.
  void end();

  /// Around the forward, and around the backward, of a micro-batch.
  class Scope {
   public:
    Scope(const StageSync& sync, bool is_last);

   private:
    std::vector<DataParallelBase::NoSync> keep_;
  };

  bool has_any() const { return !wrappers_.empty() || !blocks_.empty(); }

 private:
  std::vector<DataParallelBase*> wrappers_;
  std::vector<std::shared_ptr<Block>> blocks_;
  std::unique_ptr<FullyShardNoSync> blocks_keep_;
  bool unshards_ = false;
};

}  // namespace serried::detail
