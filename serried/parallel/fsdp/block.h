// A block: parameters that are gathered by one collective, and whose gradients are reduced by one.
#pragma once

#include <torch/csrc/autograd/function.h>

#include <memory>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

#include "serried/parallel/fsdp/context.h"
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
  c10::weak_intrusive_ptr<torch::autograd::Node> node{c10::intrusive_ptr<torch::autograd::Node>()};  // with our hook
};

/// What users may change at any time.
struct BlockSetting {
  bool reshard_after_forward = true;
  bool reshard_after_backward = true;
  bool is_root = false;  // kept through forward because it contains others, not because somebody asked for it
  bool reduces = true;
  bool all_reduces = true;
  std::optional<double> divide_factor = {};  // none: the number of ranks
};

/// Where a block lives and how it computes.
struct BlockPlace {
  Group shard_group;
  Group replica_group;  // null where nothing is replicated
  MixedPrecision precision = {};
};

class Block : public std::enable_shared_from_this<Block> {
 public:
  Block(BlockPlace place, const torch::nn::Module& module, std::vector<BlockMember> members);
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
  const torch::nn::Module* module() const { return module_; }
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
  at::Tensor part_of_whole(size_t index, const at::Tensor& whole) const;
  void note_use(size_t index);
  void note_write() { drop_whole(); }

  void unshard();
  void reshard();
  /// Lets go of the whole values, unless the user holds them.
  void release();
  bool is_gathered() const { return whole_.defined(); }
  int64_t whole_bytes() const;

  // In backward (gradients.cpp).
  void on_gradient(size_t index, const at::Tensor& gradient);
  void end_backward(int task, bool completed);

 private:
  struct Round {
    int task = 0;
    at::Tensor buffer = {};
    std::vector<bool> is_awaited = {};
    std::vector<bool> has_gradient = {};
  };

  void lay_out_members();
  void check_memory() const;
  bool is_current(const BlockMember& member) const;
  void gather();
  void lower_shard(const at::Tensor& lowered) const;
  void check_same_block(const at::Tensor& gathered) const;
  void fill_whole(const at::Tensor& gathered);
  void copy_member(const at::Tensor& gathered, const BlockMember& member) const;
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
  void keep(BlockMember& member, const at::Tensor& gradient);
  void put(Round& round, size_t index, const at::Tensor& gradient);
  void finish(Round round);
  void complete_buffer(Round& round);
  void write_flags(const Round& round);
  at::Tensor reduced(const at::Tensor& buffer) const;
  void check_same_blocks(const at::Tensor& reduced, double factor) const;
  std::vector<bool> read_flags(const Round& round, const at::Tensor& reduced) const;
  void give(BlockMember& member, const at::Tensor& reduced) const;
  int64_t gradient_length() const;

  const BlockPlace place_;
  const std::shared_ptr<ShardContext> context_;
  const torch::nn::Module* const module_;
  std::unordered_set<const torch::nn::Module*> modules_;  // the module and all in it
  const std::string type_;
  std::string path_;
  std::vector<BlockMember> members_;
  int64_t number_ = 0;
  int64_t shard_length_ = 0;  // elements, with the block's number at the end
  int64_t whole_length_ = 0;
  BlockSetting setting_;

  at::Tensor shard_;
  at::Tensor whole_;           // undefined: not gathered
  uint64_t recording_ = 0;     // in which it was gathered; 0: in none
  bool is_held_ = false;       // by unshard()
  std::vector<Round> rounds_;  // of backwards that run; one, unless they nest
  at::Tensor flags_;           // what stands behind the gradients, for the parameters `flagged_`
  std::vector<bool> flagged_;
  at::Tensor partial_;  // reduced over the shard group only: set_requires_all_reduce(false)
};

/// What a parameter of a block knows of it.
struct BlockParameter final : GatherOnUse {
  BlockParameter(std::shared_ptr<Block> block_, size_t index_) : block(std::move(block_)), index(index_) {}
  at::Tensor whole(const DTensorMeta&) override { return block->whole(index); }
  at::Tensor part_of_whole(const DTensorMeta&, const at::Tensor& whole) override {
    return block->part_of_whole(index, whole);
  }
  bool is_parameter() const override { return true; }
  void note_use() override { block->note_use(index); }
  void note_write() override { block->note_write(); }

  const std::shared_ptr<Block> block;
  const size_t index;
};

/// The block of a parameter; null where it has none.
inline std::shared_ptr<Block> block_of(const at::Tensor& t) {
  const auto* parameter = dynamic_cast<const BlockParameter*>(gather_of(t));
  return parameter != nullptr ? parameter->block : nullptr;
}

}  // namespace serried::detail
