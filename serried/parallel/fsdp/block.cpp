// Lays parameters side by side, and gathers them by one collective when an op needs one of them.
#include "serried/parallel/fsdp/block.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>

#include <cstring>

#include "serried/base/error.h"
#include "serried/base/hash.h"
#include "serried/comm/collectives/ops.h"
#include "serried/parallel/ddp/bucket.h"
#include "serried/tape/recorder.h"
#include "serried/tensor/dispatch/local_only.h"
#include "serried/tensor/when_released.h"

namespace serried::detail {
namespace {

// Elements: a cache line or more in every dtype that a block may be sent in.
constexpr int64_t kAligned = 64;
constexpr int64_t kNumberBytes = 64;

int64_t aligned(int64_t num_elements) {
  return (num_elements + kAligned - 1) / kAligned * kAligned;
}

void write_number(const at::Tensor& shard, int64_t number) {
  const int64_t length = kNumberBytes / int64_t(shard.element_size());
  shard.narrow(0, shard.numel() - length, length).view(at::kLong).fill_(number);
}

uint32_t version_of(const BlockMember& member) {
  const auto impl = member.parameter.lock();
  return impl && impl->version_counter().enabled() ? uint32_t(impl->version_counter().current_version()) : 0;
}

// `sizes` with another size along `dim`.
c10::DimVector resized(c10::IntArrayRef sizes, int64_t dim, int64_t size) {
  c10::DimVector changed(sizes);
  if (dim >= 0) changed[size_t(dim)] = size;
  return changed;
}

class GradientHook final : public torch::autograd::FunctionPreHook {
 public:
  GradientHook(std::weak_ptr<Block> block, size_t index) : block_(std::move(block)), index_(index) {}

  // Nothing goes on to the node: the block gives the parameter its gradient when all ranks' are there.
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& gradients) override {
    const auto block = block_.lock();
    if (!block) return gradients;
    block->on_gradient(index_, gradients.at(0));
    return {at::Tensor()};
  }

 private:
  const std::weak_ptr<Block> block_;
  const size_t index_;
};

}  // namespace

Block::Block(BlockPlace place, const torch::nn::Module& module, std::vector<BlockMember> members)
    : place_(std::move(place)),
      context_(ShardContext::of(place_.shard_group)),
      module_(&module),
      type_(module.name()),
      members_(std::move(members)),
      number_(context_->add(*this)) {
  for (const auto& part : module.modules(/*include_self=*/false)) modules_.insert(part.get());
  modules_.insert(&module);
  lay_out_members();
}

Block::~Block() {
  drop_whole();
  context_->remove(*this);
}

int64_t Block::world_size() const {
  return place_.shard_group->getSize();
}

at::ScalarType Block::compute_dtype() const {
  const at::ScalarType dtype = members_[0].spec->dtype;
  return c10::isFloatingType(dtype) ? place_.precision.param_dtype.value_or(dtype) : dtype;
}

at::ScalarType Block::reduce_dtype() const {
  return c10::isFloatingType(members_[0].spec->dtype) ? place_.precision.reduce_dtype.value_or(compute_dtype())
                                                      : compute_dtype();
}

void Block::lay_out_members() {
  const int64_t world = world_size();
  for (BlockMember& member : members_) {
    member.local_sizes = member.spec->local_sizes();
    const int64_t rows = member.dim < 0 ? 1 : serried::chunk(member.sizes[size_t(member.dim)], world, 0).size;
    member.chunk = c10::multiply_integers(resized(member.sizes, member.dim, rows));
    member.offset = shard_length_;
    member.whole_offset = whole_length_;
    shard_length_ += aligned(member.chunk);
    whole_length_ += aligned(member.dim < 0 ? 1 : member.chunk * world);
  }
  shard_length_ += kAligned;
}

void Block::adopt(const std::vector<at::Tensor>& parameters, const std::vector<at::Tensor>& parts) {
  const at::NoGradGuard no_grad;
  const OrdinaryMode ordinary;
  const at::TensorOptions options = parts[0].options().requires_grad(false);
  shard_ = options.device().is_meta() ? at::empty({shard_length_}, options)
                                      : allocate_for(place_.shard_group, shard_length_, options).zero_();
  if (!shard_.is_meta()) write_number(shard_, number_);
  for (size_t i = 0; i < members_.size(); ++i) {
    const BlockMember& member = members_[i];
    const int64_t length = c10::multiply_integers(member.local_sizes);
    at::Tensor local = shard_.narrow(0, member.offset, length).view(member.local_sizes);
    if (!shard_.is_meta()) local.copy_(parts[i]);
    const at::Tensor& parameter = parameters[i];
    const UsePtr old = dtensor_meta(parameter) != nullptr ? dtensor_meta(parameter)->use : nullptr;
    dtensor_meta(parameter) != nullptr ? set_meta(parameter, std::move(local), member.spec)
                                       : convert_in_place(parameter, std::move(local), member.spec);
    ParameterUse use{.layouts = old != nullptr ? old->layouts : nullptr,
                     .gather = std::make_shared<BlockParameter>(shared_from_this(), i)};
    set_use(parameter, std::make_shared<const ParameterUse>(std::move(use)));
    // What is watched keeps its use, and so this block, as long as the block watches it.
    when_released(parameter, [self = weak_from_this(), i] {
      if (const auto block = self.lock()) block->members_[i].parameter.reset();
    });
  }
}

std::string Block::text() const {
  std::string names;
  for (const BlockMember& member : members_) names += (names.empty() ? "" : ", ") + member.name;
  const std::string path = path_.empty() ? "" : c10::str(" \"", path_, "\"");
  return c10::str("block ", number_, path, " (", type_, ": ", names, ")");
}

bool Block::is_alive() const {
  return !members_[0].parameter.expired();
}

int64_t Block::whole_bytes() const {
  return whole_length_ * int64_t(c10::elementSize(compute_dtype()));
}

void Block::check_memory() const {
  if (!shard_.is_meta()) return;
  std::string names;
  for (const BlockMember& member : members_) names += (names.empty() ? "" : ", ") + member.name;
  raise<c10::Error>({"fully_shard", c10::str("parameters are still on the meta device: ", names, " of ", text()),
                     "build the module under BornSharded(mesh, ...), which gives each rank the memory of its part"});
}

bool Block::is_current(const BlockMember& member) const {
  if (!whole_.defined() || member.version != version_of(member)) return false;
  // What was gathered elsewhere is unknown to a recording, and a replay will not gather it.
  return recording_ == (tape::is_replayed() ? tape::num_recordings() : 0);
}

at::Tensor Block::whole(size_t index) {
  BlockMember& member = members_[index];
  note_use(index);
  if (tape::is_replayed()) tell_recorder(member);
  if (!is_current(member)) gather();
  if (!member.whole.defined()) {
    const LocalOnly local_only;
    const int64_t offset = whole_.is_alias_of(shard_) ? member.offset : member.whole_offset;
    member.whole = at::as_strided(whole_, member.sizes, serried::contiguous_strides(member.sizes),
                                  whole_.storage_offset() + offset);
  }
  return member.inner ? wrap(member.whole, member.inner) : member.whole;
}

// Settings decide what is gathered and reduced, and no op shows them.
void Block::tell_recorder(const BlockMember& member) {
  if (const auto parameter = member.parameter.lock()) tape::meet(parameter.get());
  const auto settings = [self = weak_from_this()]() -> uint64_t {
    const auto block = self.lock();
    if (!block) return 0;
    const BlockSetting& s = block->setting_;
    uint64_t bits = 1 | uint64_t(s.reshard_after_forward) << 1 | uint64_t(s.reshard_after_backward) << 2 |
                    uint64_t(s.reduces) << 3 | uint64_t(s.all_reduces) << 4 | uint64_t(block->is_held_) << 5;
    for (const BlockMember& each : block->members_) bits = bits * 2 + uint64_t(each.kept.defined());
    return mix_hash(bits, std::hash<double>()(s.divide_factor.value_or(0)));
  };
  tape::rely_on({.name = "settings of " + text(), .value = settings, .subject = this});
}

at::Tensor Block::part_of_whole(size_t index, const at::Tensor& whole) const {
  const BlockMember& member = members_[index];
  const DTensorMeta* meta = dtensor_meta(whole);
  const at::Tensor& plain = meta != nullptr ? meta->local : whole;
  if (member.dim < 0) return plain;
  const Span span = serried::chunk(member.sizes[size_t(member.dim)], world_size(), place_.shard_group->getRank());
  return plain.narrow(member.dim, span.begin, span.size);
}

void Block::note_use(size_t index) {
  if (torch::autograd::get_current_graph_task_id() >= 0) context_->watch_backward();
  install_hook(index);
}

// The node that adds up gradients lives as long as a graph does: a new one gets the hook when it is first met. To keep
// it alive would keep the parameter, and with it this block, alive for ever.
void Block::install_hook(size_t index) {
  BlockMember& member = members_[index];
  const auto impl = member.parameter.lock();
  if (!impl) return;
  const at::Tensor parameter(impl);
  auto node = torch::autograd::impl::try_get_grad_accumulator(parameter);
  if (!node || (!member.node.expired() && member.node._unsafe_get_target() == node.get())) return;
  node->add_pre_hook(std::make_unique<GradientHook>(weak_from_this(), index));
  member.node = c10::weak_intrusive_ptr<torch::autograd::Node>(node);
}

// The shard in the dtype that ops compute in, with the block's number behind it.
void Block::lower_shard(const at::Tensor& lowered) const {
  lowered.copy_(shard_);
  write_number(lowered, number_);
}

// Blocks of equal sizes would be taken for each other in silence.
void Block::check_same_block(const at::Tensor& gathered) const {
  if (!gathered.device().is_cpu() || tape::is_replayed()) return;
  const int64_t stride = shard_length_ * int64_t(gathered.element_size());
  const char* number = static_cast<const char*>(gathered.const_data_ptr()) + stride - kNumberBytes;
  if (place_.shard_group->getBackendName() == "fake") return;
  for (int64_t r = 0; r < world_size(); ++r, number += stride) {
    int64_t theirs = 0;
    std::memcpy(&theirs, number, sizeof theirs);
    if (theirs == number_) continue;
    raise<c10::ValueError>(
        {"fully_shard",
         c10::str("rank ", r, " of the group gathers ", context_->text_of(theirs), " while this rank gathers ", text()),
         "run the same blocks in the same order on every rank"});
  }
}

void Block::copy_member(const at::Tensor& gathered, const BlockMember& member) const {
  const int64_t world = world_size();
  const at::Tensor rows = gathered.view({world, shard_length_}).narrow(1, member.offset, member.chunk);
  if (member.dim <= 0) {
    const int64_t used = member.dim < 0 ? 1 : world;
    whole_.narrow(0, member.whole_offset, used * member.chunk)
        .view({used, member.chunk})
        .copy_(rows.narrow(0, 0, used));
    return;
  }
  const at::Tensor whole =
      whole_.narrow(0, member.whole_offset, c10::multiply_integers(member.sizes)).view(member.sizes);
  for (int64_t r = 0; r < world; ++r) {
    const Span span = serried::chunk(member.sizes[size_t(member.dim)], world, r);
    const c10::DimVector sizes = resized(member.sizes, member.dim, span.size);
    const at::Tensor part = rows.select(0, r).narrow(0, 0, c10::multiply_integers(sizes)).view(sizes);
    whole.narrow(member.dim, span.begin, span.size).copy_(part);
  }
}

void Block::fill_whole(const at::Tensor& gathered) {
  const bool by_hand = gathered.device().is_cpu() && !tape::is_replayed();
  const size_t size = gathered.element_size();
  for (const BlockMember& member : members_) {
    if (!by_hand || member.dim > 0) {
      copy_member(gathered, member);
      continue;
    }
    const char* from = static_cast<const char*>(gathered.const_data_ptr()) + size_t(member.offset) * size;
    char* to = static_cast<char*>(whole_.mutable_data_ptr()) + size_t(member.whole_offset) * size;
    const size_t bytes = size_t(member.chunk) * size;
    const int64_t used = member.dim < 0 ? 1 : world_size();
    for (int64_t r = 0; r < used; ++r) {
      std::memcpy(to + size_t(r) * bytes, from + size_t(r * shard_length_) * size, bytes);
    }
  }
}

void Block::gather() {
  check_memory();
  drop_whole();
  context_->make_room(*this);
  // Who looks on to run a function again would take the memory that blocks share for state, which changes once.
  const tape::Aside unseen_by_onlookers(tape::is_replayed() ? tape::current_recorder() : nullptr);
  const OrdinaryMode ordinary;
  const LocalOnly local_only;
  for (BlockMember& member : members_) member.version = version_of(member);
  recording_ = tape::is_replayed() ? tape::num_recordings() : 0;
  ++context_->num_gathers;
  const bool lowers = compute_dtype() != shard_.scalar_type();
  if (world_size() == 1 && !lowers) {
    whole_ = shard_;
    return;
  }
  BufferPool& pool = context_->whole;
  const at::TensorOptions options = shard_.options().dtype(compute_dtype());
  const Borrowed lowered(pool, lowers ? pool.take(shard_length_, options) : at::Tensor());
  if (lowers) lower_shard(lowered.tensor);
  const Borrowed gathered(pool, pool.take(world_size() * shard_length_, options));
  try {
    ops::all_gather_into(gathered.tensor, lowers ? lowered.tensor : shard_, place_.shard_group);
  } catch (c10::Error& error) {
    error.add_context("while " + text() + " was gathered");
    throw;
  }
  check_same_block(gathered.tensor);
  whole_ = pool.take(whole_length_, options);
  fill_whole(gathered.tensor);
}

void Block::drop_whole() {
  for (BlockMember& member : members_) member.whole.reset();
  if (!whole_.defined()) return;
  at::Tensor whole = std::move(whole_);
  whole_ = at::Tensor();
  if (!whole.is_alias_of(shard_)) context_->whole.give_back(std::move(whole));
}

void Block::release() {
  if (!is_held_) drop_whole();
}

void Block::unshard() {
  is_held_ = true;
  bool is_there = true;
  for (const BlockMember& member : members_) is_there = is_there && is_current(member);
  if (!is_there) gather();
}

void Block::reshard() {
  is_held_ = false;
  drop_whole();
}

}  // namespace serried::detail
