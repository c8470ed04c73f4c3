// A block: parameters that are gathered by one collective, and whose gradients are reduced by one.
#pragma once

#include <torch/csrc/autograd/function.h>

#include <memory>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

#include "serried/comm/collectives/collective.h"
#include "serried/parallel/fsdp/context.h"
#include "serried/parallel/fsdp/hooks.h"
#include "serried/parallel/mixed_precision.h"
#include "serried/tensor/gather_on_use.h"

namespace torch::nn {
class Module;
}

namespace serried::detail {

/// A parameter of a block. Its whole value is what one rank has between gather and release: all of the parameter, or
/// the part that other axes of its mesh leave.
struct BlockMember {
  std::string name;
  c10::weak_intrusive_ptr<c10::TensorImpl> parameter;
  SpecPtr spec;          // of the parameter
  SpecPtr inner;         // of the whole value where other axes cut it, too; else null
  c10::DimVector sizes;  // of the whole value on this rank
  int64_t dim = 0;       // along which it is cut; -1: a number, which every rank has
  c10::DimVector local_sizes = {};
  int64_t chunk = 0;         // elements of the largest part
  int64_t offset = 0;        // of the part in the shard buffer
  int64_t whole_offset = 0;  // in the whole buffer
  at::Tensor whole = {};     // while gathered and used
  uint32_t version = 0;      // of the parameter when it was gathered
  at::Tensor kept = {};      // whole gradient that backwards under no_sync have added up
  uint64_t kept_in = 0;      // the recording that made it; of no meaning outside of one
  c10::weak_intrusive_ptr<torch::autograd::Node> node{c10::intrusive_ptr<torch::autograd::Node>()};  // with our hook
};

class Block;

/// What users may change at any time.
struct BlockSetting {
  bool reshard_after_forward = true;
  bool reshard_after_backward = true;
  bool is_root = false;  // kept through forward because it contains others, not because somebody asked for it
  bool reduces = true;
  bool all_reduces = true;
  std::optional<double> divide_factor = {};  // none: the number of ranks
  bool sums = false;                         // and divides by hand, also where the backend could average
  FullyShardHooks hooks = {};
  uint64_t num_hook_changes = 0;  // a graph keeps to the hooks it was recorded with
  // What to gather ahead when this block is used; where there is none the order of the last pass tells.
  std::vector<std::weak_ptr<Block>> next_in_forward = {};
  std::vector<std::weak_ptr<Block>> next_in_backward = {};
};

/// Where a block lives and how it computes.
struct BlockPlace {
  Group shard_group;
  Group replica_group;  // null where nothing is replicated
  MixedPrecision precision = {};
  bool overlaps = false;  // gathers ahead, reduces while backward goes on
};

class Block : public std::enable_shared_from_this<Block> {
 public:
  Block(BlockPlace place, std::vector<const torch::nn::Module*> modules, std::vector<BlockMember> members);
  ~Block();
  Block(const Block&) = delete;

  /// Gives the parameters their place in the shard buffer; `parts` are this rank's, in the order of the members.
  void adopt(const std::vector<at::Tensor>& parameters, const std::vector<at::Tensor>& parts);

  int64_t number() const { return number_; }
  /// `block 2 "layers.1" (LinearImpl: weight, bias)`
  std::string text() const;
  BlockSetting& setting() { return setting_; }
  const BlockSetting& setting() const { return setting_; }
  const std::vector<BlockMember>& members() const { return members_; }
  /// Those that fully_shard was called with: mostly one.
  const std::vector<const torch::nn::Module*>& roots() const { return roots_; }
  bool contains(const torch::nn::Module* module) const { return modules_.count(module) != 0; }
  /// Calls `add` with each parameter's TensorImpl.
  template <class Add>
  void name_parameters(const Add& add) const {
    for (const BlockMember& member : members_) add(member.parameter._unsafe_get_target());
  }
  bool is_alive() const;
  void set_path(const std::string& path) { path_ = path; }
  ShardContext& context() const { return *context_; }

  // While ops run.
  at::Tensor whole(size_t index);
  /// A copy in the dtype of the parameter.
  at::Tensor whole_to_write(size_t index);
  at::Tensor parameter(size_t index) const { return at::Tensor(members_[index].parameter.lock()); }
  at::Tensor part_of_whole(size_t index, const at::Tensor& whole) const;
  void note_use(size_t index);
  void note_write();

  /// A recorded function is about to change what `setting()` says, or whether whole values are held.
  void rely_on_settings();
  void unshard(bool async);
  void reshard();
  /// Lets go of the whole values, unless the user holds them.
  void release();
  bool is_gathered() const { return whole_.defined(); }
  /// Whole values are on their way, and nobody has used them yet.
  bool is_on_its_way() const { return work_ != nullptr; }
  bool is_asked_for() const { return is_asked_for_; }
  bool overlaps() const { return place_.overlaps; }
  /// Starts to gather what no op needs yet; `asked_for`: by the user.
  void gather_ahead(bool asked_for);
  /// Blocks until what is on its way is there.
  void arrive();
  int64_t whole_bytes() const;
  /// That ops compute in where it is not the parameters' own.
  std::optional<at::ScalarType> lowered_dtype() const;
  bool casts_inputs() const { return place_.precision.cast_forward_inputs; }

  // In backward (gradients.cpp).
  void on_gradient(size_t index, const at::Tensor& gradient);
  void end_backward(int task, bool completed);
  /// Gives the gradients whose reduction this backward started first, once they are there.
  void settle(int task);

 private:
  // A gradient that the other axes of its mesh have not summed up yet.
  struct Unsummed {
    size_t index;
    at::Tensor given;  // while it is held, autograd does not add to it in place
    at::Tensor sum;    // the same under a name of its own
  };

  struct Round {
    int task = 0;
    at::Tensor buffer = {};
    std::vector<bool> is_awaited = {};
    std::vector<bool> has_gradient = {};
    std::vector<Unsummed> unsummed = {};  // of norms and biases whose tokens tensor parallel has cut: done together
  };

  // Gradients on their way.
  struct Reduction {
    Round round = {};
    at::Tensor result = {};
    bool is_sum = false;  // else the average
    double factor = 1;    // that a sum is divided by
    WorkPtr work = {};
  };

  void lay_out_members();
  void check_memory() const;
  bool is_current(const BlockMember& member) const;
  bool is_current() const;
  void gather(bool starts_only = false);
  at::Tensor sent_shard();
  void gather_from(const at::Tensor& shard, bool starts_only);
  void gather_by_hook(const at::Tensor& shard);
  void end_gather();
  void gather_recorded(const at::Tensor& shard);
  void gather_into(const at::Tensor& whole, const at::Tensor& shard) const;
  void check_same_block() const;
  void drop_whole();
  void install_hook(size_t index);
  void tell_recorder(const BlockMember& member);
  at::ScalarType compute_dtype() const;
  at::ScalarType reduce_dtype() const;
  int64_t world_size() const;

  Round& round_of(int task);
  std::vector<bool> awaited() const;
  at::Tensor plain_gradient(const BlockMember& member, const at::Tensor& gradient) const;
  void check_recordable() const;
  bool may_sum_later(const BlockMember& member, const at::Tensor& gradient) const;
  void sum_up(Round& round) const;
  void keep(BlockMember& member, const at::Tensor& gradient);
  void put(Round& round, size_t index, const at::Tensor& gradient) const;
  void finish(Round round);
  void complete_buffer(Round& round);
  void write_flags(const Round& round);
  void start_reduction(Reduction& reduction, bool async) const;
  void complete(Reduction reduction);
  void drop_reductions(int task);
  bool reduce_over_replicas(at::Tensor& result, bool is_sum);
  void check_same_blocks(const at::Tensor& reduced, bool is_sum) const;
  std::vector<bool> read_flags(const Reduction& reduction) const;
  void check_used_alike(const Reduction& reduction) const;
  int64_t num_ranks() const;
  void give(BlockMember& member, const at::Tensor& reduced) const;
  int64_t gradient_length() const;

  const BlockPlace place_;
  const std::shared_ptr<ShardContext> context_;
  const std::vector<const torch::nn::Module*> roots_;
  std::vector<std::weak_ptr<const torch::nn::Module>> living_roots_;  // those of them that holders share
  std::unordered_set<const torch::nn::Module*> modules_;              // the roots and all in them
  const std::string type_;
  std::string path_;
  std::vector<BlockMember> members_;
  int64_t number_ = 0;
  int64_t shard_length_ = 0;  // elements, with the block's number at the end
  int64_t whole_length_ = 0;
  std::vector<int64_t> table_;  // where rows of the shards go (comm/collectives/rows.h), and last their numbers
  BlockSetting setting_;

  at::Tensor shard_;
  at::Tensor whole_;           // undefined: not gathered
  uint64_t recording_ = 0;     // in which it was gathered; 0: in none
  uint64_t written_in_ = 0;    // the recording that knows of a write
  bool is_held_ = false;       // by unshard()
  WorkPtr work_;               // of a gather that was started ahead; null: whole_ may be used
  bool is_asked_for_ = false;  // it was, by the user
  at::Tensor lowered_;         // what peers read until then
  std::vector<Round> rounds_;  // of backwards that run; one, unless they nest
  std::vector<Reduction> reductions_;
  at::Tensor flags_;  // what stands behind the gradients, for the parameters `flagged_`
  std::vector<bool> flagged_;
  at::Tensor partial_;  // reduced over the shard group only: set_requires_all_reduce(false)
};

/// What a parameter of a block knows of it.
struct BlockParameter final : GatherOnUse {
  BlockParameter(std::shared_ptr<Block> block_, size_t index_) : block(std::move(block_)), index(index_) {}
  at::Tensor whole(const DTensorMeta&) override { return block->whole(index); }
  at::Tensor whole_to_write(const DTensorMeta&) override { return block->whole_to_write(index); }
  at::Tensor part_of_whole(const DTensorMeta&, const at::Tensor& whole) override {
    return block->part_of_whole(index, whole);
  }
  bool is_parameter() const override { return true; }
  void note_use() override { block->note_use(index); }
  void note_write() override { block->note_write(); }
  at::Tensor parameter() const override { return block->parameter(index); }
  std::optional<at::ScalarType> other_dtype() const override { return block->lowered_dtype(); }
  bool casts_inputs() const override { return block->casts_inputs(); }

  const std::shared_ptr<Block> block;
  const size_t index;
};

/// The block of a parameter; null where it has none.
inline std::shared_ptr<Block> block_of(const at::Tensor& t) {
  const auto* parameter = dynamic_cast<const BlockParameter*>(gather_of(t));
  return parameter != nullptr ? parameter->block : nullptr;
}

}  // namespace serried::detail
