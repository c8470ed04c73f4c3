// fully_shard: every rank keeps a part of each parameter, and has it whole while an op needs it.
#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <optional>
#include <vector>

#include "serried/parallel/fsdp/hooks.h"
#include "serried/parallel/fsdp/options.h"

namespace serried {

namespace detail {
class Block;
struct BlockSetting;
}  // namespace detail

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

struct UnshardOptions {
  bool async = false;  // starts only
};

/// A gather that was started. Nobody has to wait for it: an op that needs the parameters does.
class UnshardHandle {
 public:
  explicit UnshardHandle(std::weak_ptr<detail::Block> block) : block_(std::move(block)) {}
  /// Until the parameters are whole; raises what went wrong.
  void wait() const;

 private:
  std::weak_ptr<detail::Block> block_;
};

/// What fully_shard returns: the module's own block, and those inside it. A value; nobody has to keep it.
class FullyShardHandle {
 public:
  FullyShardHandle(std::shared_ptr<detail::Block> own, std::vector<std::shared_ptr<detail::Block>> inside);

  /// For gradient accumulation, around forward and backward of a micro-batch. This block and all inside it.
  ///     { auto guard = handle.no_sync(micro < 3);  loss(micro).backward(); }
  [[nodiscard]] FullyShardNoSync no_sync(bool enabled = true) const;

  /// Gathers the block now and keeps it whole until reshard(). Every rank of its mesh calls it.
  ///     auto gathering = handle.unshard({.async = true});  ...  gathering.wait();
  UnshardHandle unshard(UnshardOptions options = {}) const;
  /// Lets go of the whole values. The next op that needs them gathers again.
  void reshard() const;

  // Of this block and all inside it.
  void set_reshard_after_forward(bool reshard) const;
  void set_reshard_after_backward(bool reshard) const;
  /// On a (replicate, shard) mesh: whether a backward reduces over the replicas as well. Off: the next one that does
  /// takes the part of this one with it.
  void set_requires_all_reduce(bool all_reduce) const;
  /// Off: as under no_sync().
  void set_requires_gradient_sync(bool reduce) const;
  /// What sums of gradients are divided by; none: the number of ranks.
  void set_gradient_divide_factor(std::optional<double> factor) const;
  /// Sums and divides by hand, also where the backend could average.
  void set_force_sum_reduction_for_comms(bool sum) const;

  // In place of this block's collectives, or behind them; {} takes a hook back. Blocks inside have their own.
  void set_custom_all_gather(AllGatherHook hook) const;
  void set_custom_reduce_scatter(ReduceScatterHook hook) const;
  /// Once gradients are reduced, over replicas as well, and before parameters get them.
  void set_all_reduce_hook(ReducedGradientHook hook) const;

  /// When a pass comes to this block, it starts to gather the blocks of `next`, however many cores there are, and not
  /// what the order of the last pass tells. All of them are whole at once. {}: by the order again.
  void set_modules_to_forward_prefetch(const std::vector<FullyShardHandle>& next) const;
  void set_modules_to_backward_prefetch(const std::vector<FullyShardHandle>& next) const;

  /// What is whole now, and since the last call at most.
  FullyShardUsage usage() const;
  /// Bytes of this block's parameters while they are whole.
  int64_t whole_bytes() const;

 private:
  detail::BlockSetting& own_setting(const char* where) const;
  static std::vector<std::weak_ptr<detail::Block>> own_blocks(const char* where,
                                                              const std::vector<FullyShardHandle>& handles);

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

/// Several modules as one block: for those that run one after the other and are small alone.
///     fully_shard({net->norm.get(), net->head.get()});
FullyShardHandle fully_shard(const std::vector<torch::nn::Module*>& modules, FullyShardOptions options = {});

}  // namespace serried
