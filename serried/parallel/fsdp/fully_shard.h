// fully_shard: every rank keeps a part of each parameter, and has it whole while an op needs it.
#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <optional>
#include <vector>

#include "serried/parallel/fsdp/options.h"

namespace serried {

namespace detail {
class Block;
}

/// Backwards while it is alive keep each rank's own whole gradients; the next one outside adds them to its average.
class FullyShardNoSync {
 public:
  FullyShardNoSync(std::vector<std::shared_ptr<detail::Block>> blocks, bool enabled);
  ~FullyShardNoSync();
  FullyShardNoSync(const FullyShardNoSync&) = delete;
  FullyShardNoSync& operator=(const FullyShardNoSync&) = delete;

 private:
  std::vector<std::shared_ptr<detail::Block>> blocks_;  // those that reduced before
};

/// Counters of this rank, over all blocks of the same ranks.
struct FullyShardUsage {
  int64_t gathered_bytes = 0;       // of whole values now, with what is on its way
  int64_t peak_gathered_bytes = 0;  // since they were last asked for
  int64_t gradient_bytes = 0;       // of whole gradients on their way
  int64_t peak_gradient_bytes = 0;
  int64_t num_gathers = 0;
  int64_t num_reductions = 0;
};

/// What fully_shard returns: the module's own block, and those inside it. A value; nobody has to keep it.
class FullyShardHandle {
 public:
  FullyShardHandle(std::shared_ptr<detail::Block> own, std::vector<std::shared_ptr<detail::Block>> inside);

  /// For gradient accumulation, around forward and backward of a micro-batch. This block and all inside it.
  ///     { auto guard = handle.no_sync(micro < 3);  loss(micro).backward(); }
  [[nodiscard]] FullyShardNoSync no_sync(bool enabled = true) const;

  /// Gathers the block now and keeps it whole until reshard(). Every rank of its mesh calls it.
  void unshard() const;
  /// Lets go of the whole values. The next op that needs them gathers again.
  void reshard() const;

  // Of this block and all inside it.
  void set_reshard_after_forward(bool reshard) const;
  void set_reshard_after_backward(bool reshard) const;
  /// On a (replicate, shard) mesh: whether a backward reduces over the replicas as well. Off: the next one that does
  /// takes the part of this one with it.
  void set_requires_all_reduce(bool all_reduce) const;
  /// What sums of gradients are divided by; none: the number of ranks.
  void set_gradient_divide_factor(std::optional<double> factor) const;

  /// Hints that nothing depends on: blocks are gathered when an op needs them.
  void set_modules_to_forward_prefetch(const std::vector<FullyShardHandle>& next) const;
  void set_modules_to_backward_prefetch(const std::vector<FullyShardHandle>& next) const;

  /// What is whole now, and since the last call at most.
  FullyShardUsage usage() const;
  /// Bytes of this block's parameters while they are whole.
  int64_t whole_bytes() const;

 private:
  std::shared_ptr<detail::Block> own_;  // null: all parameters belong to blocks inside
  std::vector<std::shared_ptr<detail::Block>> all_;
};

/// Cuts the parameters of `module` that no block has yet over the ranks of the mesh: they become DTensors of their
/// global sizes in place, and with them one block. An op that needs one of them gathers all of the block by one
/// collective; their gradients are averaged by one, and `.grad` is cut like the parameter. Inputs, activations and
/// outputs stay what they are, and any optimizer works. Call it bottom-up: layers first, then the module around them.
/// The values of the mesh's first rank count. Parameters that lie on another mesh of the same root already (tensor
/// parallel) are cut further.
///     for (auto& layer : *net->layers) fully_shard(*layer);
///     fully_shard(*net);
FullyShardHandle fully_shard(torch::nn::Module& module, FullyShardOptions options = {});

}  // namespace serried
