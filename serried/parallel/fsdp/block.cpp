// Lays parameters side by side, and gathers them by one collective when an op needs one of them.
#include "serried/parallel/fsdp/block.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <cstring>

#include "serried/base/error.h"
#include "serried/base/hash.h"
#include "serried/comm/collectives/ops.h"
#include "serried/comm/collectives/rows.h"
#include "serried/parallel/ddp/bucket.h"
#include "serried/tape/facts.h"
#include "serried/tape/module_options.h"
#include "serried/tape/recorder.h"
#include "serried/tape/tape.h"
#include "serried/tensor/debug/comm_notes.h"
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

std::string names_of(const std::vector<const torch::nn::Module*>& modules) {
  std::string names;
  for (const torch::nn::Module* module : modules) names += (names.empty() ? "" : " and ") + module->name();
  return names;
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

Block::Block(BlockPlace place, std::vector<const torch::nn::Module*> modules, std::vector<BlockMember> members)
    : place_(std::move(place)),
      context_(ShardContext::of(place_.shard_group)),
      roots_(std::move(modules)),
      type_(names_of(roots_)),
      members_(std::move(members)),
      number_(context_->add(*this)) {
  for (const torch::nn::Module* root : roots_) {
    for (const auto& part : root->modules(/*include_self=*/false)) modules_.insert(part.get());
    modules_.insert(root);
    if (auto alive = root->weak_from_this(); !alive.expired()) living_roots_.push_back(std::move(alive));
  }
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
    const int64_t size = member.dim < 0 ? 1 : member.sizes[size_t(member.dim)];
    const int64_t rows = serried::chunk(size, world, 0).size;
    const c10::IntArrayRef sizes = member.sizes;
    const RowsOfTensor places{
        .from = shard_length_,
        .to = whole_length_,
        .outer = member.dim < 0 ? 1 : c10::multiply_integers(sizes.slice(0, size_t(member.dim))),
        .rows = size,
        .inner = member.dim < 0 ? 1 : c10::multiply_integers(sizes.slice(size_t(member.dim) + 1))};
    member.chunk = places.outer * rows * places.inner;
    member.offset = places.from;
    member.whole_offset = places.to;
    append(table_, places);
    shard_length_ += aligned(member.chunk);
    whole_length_ += aligned(c10::multiply_integers(sizes));
  }
  shard_length_ += kAligned;
  // Behind the whole values come the numbers of the blocks that ranks have gathered.
  const int64_t length = kNumberBytes / int64_t(c10::elementSize(compute_dtype()));
  append(table_, {.from = shard_length_ - length, .to = whole_length_, .rows = world, .inner = length});
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

bool Block::is_current() const {
  return std::all_of(members_.begin(), members_.end(), [&](const BlockMember& member) { return is_current(member); });
}

at::Tensor Block::whole(size_t index) {
  BlockMember& member = members_[index];
  note_use(index);
  if (tape::is_recording()) tell_recorder(member);
  const bool is_next = context_->note(*this);
  if (!is_current(member)) {
    gather();
  } else if (work_) {
    context_->make_room(*this, /*came_ahead=*/true);
    arrive();
  }
  if (is_next) context_->gather_ahead_of(*this);
  if (!member.whole.defined()) {
    const LocalOnly local_only;
    const int64_t offset = whole_.is_alias_of(shard_) ? member.offset : member.whole_offset;
    member.whole = at::as_strided(whole_, member.sizes, serried::contiguous_strides(member.sizes),
                                  whole_.storage_offset() + offset);
  }
  return member.inner ? wrap(member.whole, member.inner) : member.whole;
}

// Ops compute in a lower precision than parameters are kept in: through that no write would keep what it does not
// touch.
at::Tensor Block::whole_to_write(size_t index) {
  if (!lowered_dtype().has_value()) return whole(index).clone();
  const BlockMember& member = members_[index];
  note_use(index);
  check_memory();
  if (tape::is_recording()) tell_recorder(member);
  const tape::Aside unseen_by_onlookers(tape::is_replayed() ? tape::current_recorder() : nullptr);
  const OrdinaryMode ordinary;
  const LocalOnly local_only;
  const at::Tensor all = at::empty({whole_length_}, shard_.options());
  gather_into(all, shard_);
  at::Tensor own =
      at::as_strided(all, member.sizes, serried::contiguous_strides(member.sizes), member.whole_offset).clone();
  return member.inner ? wrap(std::move(own), member.inner) : own;
}

void Block::tell_recorder(const BlockMember& member) {
  if (const auto parameter = member.parameter.lock()) {
    tape::detail::current->read_whole(parameter.get());
    if (tape::is_replayed()) tape::meet(parameter.get());
  }
  if (!tape::is_replayed()) return;
  rely_on_settings();
  for (const auto& root : living_roots_) {
    const auto alive = root.lock();
    if (alive == nullptr) continue;
    tape::rely_on(tape::training_mode(text(), alive));
    tape::rely_on(tape::options_of(text(), alive));
  }
}

// Settings decide what is gathered and reduced, and no op shows them. Who changes one tells it before: what a function
// changes and puts back is its own business.
void Block::rely_on_settings() {
  if (!tape::is_replayed()) return;
  const auto settings = [self = weak_from_this()]() -> uint64_t {
    const auto block = self.lock();
    if (!block) return 0;
    const BlockSetting& s = block->setting_;
    uint64_t bits = 1 | uint64_t(s.reshard_after_forward) << 1 | uint64_t(s.reshard_after_backward) << 2 |
                    uint64_t(s.reduces) << 3 | uint64_t(s.all_reduces) << 4 | uint64_t(block->is_held_) << 5 |
                    uint64_t(s.sums) << 6 | uint64_t(block->partial_.defined()) << 7;
    bits = mix_hash(bits, s.num_hook_changes);
    for (const BlockMember& each : block->members_) bits = mix_hash(bits, uint64_t(each.kept.defined()));
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

// What peers get: the shard in the dtype that ops compute in, with the block's number behind it.
at::Tensor Block::sent_shard() {
  if (compute_dtype() == shard_.scalar_type()) return shard_;
  lowered_ = context_->lowered.take(shard_length_, shard_.options().dtype(compute_dtype()));
  lowered_.copy_(shard_);
  write_number(lowered_, number_);
  return lowered_;
}

// Blocks of equal sizes would be taken for each other in silence.
void Block::check_same_block() const {
  if (!whole_.device().is_cpu() || place_.shard_group->getBackendName() == "fake") return;
  const char* number = static_cast<const char*>(whole_.const_data_ptr()) + whole_bytes();
  for (int64_t r = 0; r < world_size(); ++r, number += kNumberBytes) {
    int64_t theirs = 0;
    std::memcpy(&theirs, number, sizeof theirs);
    if (theirs == number_) continue;
    raise<c10::ValueError>(
        {"fully_shard",
         c10::str("rank ", r, " of the group gathers ", context_->text_of(theirs), " while this rank gathers ", text()),
         "run the same blocks in the same order on every rank"});
  }
}

void Block::gather(bool starts_only) {
  const comm_debug::OnBehalf scope([&](auto add) { name_parameters(add); });
  check_memory();
  drop_whole();
  if (!starts_only) context_->make_room(*this);
  // Who looks on to run a function again would take the memory that blocks share for state, which changes once.
  const tape::Aside unseen_by_onlookers(tape::is_replayed() ? tape::current_recorder() : nullptr);
  const OrdinaryMode ordinary;
  const LocalOnly local_only;
  for (BlockMember& member : members_) member.version = version_of(member);
  recording_ = tape::is_replayed() ? tape::num_recordings() : 0;
  ++context_->num_gathers;
  try {
    const at::Tensor shard = sent_shard();
    if (world_size() == 1 && shard.is_same(shard_)) {
      whole_ = shard_;
      return;
    }
    gather_from(shard, starts_only);
    if (!work_) end_gather();
  } catch (c10::Error& error) {
    drop_whole();
    error.add_context("while " + text() + " was gathered");
    throw;
  } catch (...) {  // a user's hook
    drop_whole();
    throw;
  }
}

void Block::gather_from(const at::Tensor& shard, bool starts_only) {
  if (tape::is_replayed()) return gather_recorded(shard);
  const int64_t numbers = world_size() * kNumberBytes / int64_t(shard.element_size());
  whole_ = context_->whole.take(whole_length_ + numbers, shard.options());
  if (setting_.hooks.all_gather) return gather_by_hook(shard);
  ops::gather_rows_into(whole_, shard, place_.shard_group, table_, starts_only ? &work_ : nullptr);
}

void Block::gather_by_hook(const at::Tensor& shard) {
  BufferPool& pool = context_->whole;
  const Borrowed gathered(pool, pool.take(world_size() * shard_length_, shard.options()));
  setting_.hooks.all_gather(gathered.tensor, shard, place_.shard_group);
  copy_rows(table_, int(world_size()), gathered.tensor, whole_);
}

void Block::end_gather() {
  work_.reset();
  if (lowered_.defined()) context_->lowered.give_back(std::move(lowered_));
  lowered_ = at::Tensor();
  if (!tape::is_replayed()) check_same_block();
}

void Block::gather_ahead(bool asked_for) {
  if (whole_.defined() && is_current()) return;
  gather(/*starts_only=*/true);
  is_asked_for_ = asked_for;
}

void Block::arrive() {
  if (!work_) return;
  try {
    work_->wait();
    end_gather();
  } catch (c10::Error& error) {
    drop_whole();
    error.add_context("while " + text() + " was gathered");
    throw;
  }
}

// Without a pool: a graph starts gathers early and plans their memory by itself.
void Block::gather_recorded(const at::Tensor& shard) {
  whole_ = at::empty({whole_length_}, shard.options());
  gather_into(whole_, shard);
}

// In memory of its own, and without the numbers of blocks.
void Block::gather_into(const at::Tensor& whole, const at::Tensor& shard) const {
  const at::IntArrayRef without_numbers = at::IntArrayRef(table_).slice(0, table_.size() - RowTable::kFields);
  if (!setting_.hooks.all_gather) {
    return ops::gather_rows_into(whole, shard, place_.shard_group, without_numbers);
  }
  const at::Tensor gathered = at::empty({world_size() * shard_length_}, shard.options());
  setting_.hooks.all_gather(gathered, shard, place_.shard_group);
  copy_rows(without_numbers, int(world_size()), gathered, whole);
}

// What is on its way need not be waited for: its Work keeps the memory until it is done.
void Block::drop_whole() {
  for (BlockMember& member : members_) member.whole.reset();
  is_asked_for_ = false;
  if (lowered_.defined()) context_->lowered.give_back(std::move(lowered_));
  lowered_ = at::Tensor();
  if (whole_.defined()) {
    at::Tensor whole = std::move(whole_);
    whole_ = at::Tensor();
    if (!whole.is_alias_of(shard_)) context_->whole.give_back(std::move(whole));
  }
  work_.reset();
}

// Versions do not tell of a write through data() or detach(), which a replay repeats without a word.
void Block::note_write() {
  drop_whole();
  if (!tape::is_replayed() || written_in_ == tape::num_recordings()) return;
  written_in_ = tape::num_recordings();
  tape::after_replay([self = weak_from_this()] {
    if (const auto block = self.lock()) block->drop_whole();
  });
}

void Block::release() {
  if (!is_held_) drop_whole();
}

void Block::unshard(bool async) {
  rely_on_settings();
  is_held_ = true;
  if (!is_current()) gather(/*starts_only=*/async && !tape::is_replayed());
  if (!async) arrive();
}

void Block::reshard() {
  rely_on_settings();
  is_held_ = false;
  drop_whole();
}

std::optional<at::ScalarType> Block::lowered_dtype() const {
  return compute_dtype() == members_[0].spec->dtype ? std::nullopt : std::optional(compute_dtype());
}

}  // namespace serried::detail
