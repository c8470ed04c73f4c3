// The gradients of a block on their way: laid out rank by rank, reduced by one collective, given to the parameters.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cmath>

#include "serried/base/error.h"
#include "serried/comm/collectives/ops.h"
#include "serried/parallel/fsdp/block.h"
#include "serried/tape/recorder.h"
#include "serried/tape/tape.h"
#include "serried/tensor/debug/comm_notes.h"
#include "serried/tensor/dispatch/handlers.h"
#include "serried/tensor/dispatch/local_only.h"
#include "serried/tensor/dtensor.h"
#include "serried/tensor/making/joined_sums.h"

namespace serried::detail {
namespace {

bool any_of(const std::vector<bool>& flags) {
  return std::find(flags.begin(), flags.end(), true) != flags.end();
}

[[noreturn]] void refuse_graph(const std::string& name) {
  raise<c10::NotImplementedError>(
      {"backward", c10::str("with create_graph, and the average of the gradient of ", name, " has no gradient"),
       "compute second derivatives by autograd::grad, which gives this rank's own gradients"});
}

double number_at(const at::Tensor& flat, int64_t index) {
  const bool is_near = flat.device().is_cpu() && flat.scalar_type() == at::kFloat;
  return is_near ? double(flat.const_data_ptr<float>()[index]) : flat[index].item<double>();
}

// Sums of half-precision numbers overflow soon: one half of the division comes first. A power of two, which is exact.
double early_divisor(int64_t num_ranks) {
  double divisor = 1;
  while (divisor * divisor < double(num_ranks)) divisor *= 2;
  return divisor;
}

}  // namespace

// Behind the parts there is a number for each parameter, whether any rank has a gradient for it, and that of the block.
int64_t Block::gradient_length() const {
  return shard_length_ + (int64_t(members_.size()) + 1 + 63) / 64 * 64;
}

// Which parameters the running backward reaches.
std::vector<bool> Block::awaited() const {
  std::vector<bool> awaited(members_.size());
  const auto* nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  const auto* chosen = torch::autograd::get_current_graph_task_exec_info();
  for (size_t i = 0; i < members_.size(); ++i) {
    if (members_[i].node.expired()) continue;
    torch::autograd::Node* node = members_[i].node._unsafe_get_target();
    if (chosen != nullptr && !chosen->empty()) {
      const auto found = chosen->find(node);
      awaited[i] = found != chosen->end() && found->second.should_execute();
    } else {
      awaited[i] = nodes != nullptr && nodes->count(node) != 0;
    }
  }
  return awaited;
}

Block::Round& Block::round_of(int task) {
  for (Round& round : rounds_) {
    if (round.task == task) return round;
  }
  context_->make_room_for_gradients();
  const at::TensorOptions options = shard_.options().dtype(reduce_dtype());
  rounds_.push_back({.task = task,
                     .buffer = context_->gradients.take(world_size() * gradient_length(), options),
                     .is_awaited = awaited(),
                     .has_gradient = std::vector<bool>(members_.size())});
  return rounds_.back();
}

// As this rank computed it, with the sizes of the whole value.
at::Tensor Block::plain_gradient(const BlockMember& member, const at::Tensor& gradient) const {
  if (gradient.is_sparse()) return gradient.to_dense();
  const DTensorMeta* meta = dtensor_meta(gradient);
  if (meta == nullptr && !member.inner) return gradient;
  if (meta != nullptr && member.inner && meta->spec->mesh == member.inner->mesh) {
    return dtensor_meta(DTensor(gradient).redistribute(member.inner->placements))->local;
  }
  if (meta != nullptr && gather_of(*meta) != nullptr && !member.inner) return whole_local(*meta);
  raise<c10::NotImplementedError>({"backward",
                                   c10::str("the gradient of ", member.name, " in ", text(), " is ",
                                            meta != nullptr ? meta->spec->to_string() : "a plain tensor",
                                            ", of which no average over ranks is known"),
                                   member.inner
                                       ? "compute with DTensors of the mesh the parameter had before fully_shard"
                                       : "compute with plain tensors beside fully sharded parameters"});
}

// The other axes of its mesh sum it up when the block's gradients are all there. Not beside one that was kept: that is
// summed up already.
bool Block::may_sum_later(const BlockMember& member, const at::Tensor& gradient) const {
  const DTensorMeta* meta = gradient.defined() && !gradient.is_sparse() ? dtensor_meta(gradient) : nullptr;
  return meta != nullptr && member.inner && setting_.reduces && !member.kept.defined() &&
         meta->spec->mesh == member.inner->mesh && only_sums(meta->spec->placements, member.inner->placements);
}

void Block::sum_up(Round& round) const {
  std::vector<PendingSum> sums;
  for (const Unsummed& each : round.unsummed) {
    const BlockMember& member = members_[each.index];
    sums.push_back({at::Tensor(member.parameter.lock()), each.sum, member.inner->placements});
  }
  add_up_together(std::move(sums));
  for (const Unsummed& each : round.unsummed) put(round, each.index, dtensor_meta(each.sum)->local);
  round.unsummed.clear();
}

void Block::keep(BlockMember& member, const at::Tensor& gradient) {
  if (member.kept.defined()) {
    member.kept.add_(gradient);
  } else {
    member.kept = gradient.clone(at::MemoryFormat::Contiguous);
    member.kept_in = tape::num_recordings();
  }
}

void Block::put(Round& round, size_t index, const at::Tensor& gradient) const {
  const LocalOnly local_only;
  const BlockMember& member = members_[index];
  const int64_t world = world_size(), length = gradient_length();
  if (member.dim < 0) {
    round.buffer.view({world, length}).narrow(1, member.offset, 1).copy_(gradient.reshape({1, 1}).expand({world, 1}));
    return;
  }
  const int64_t size = member.sizes[size_t(member.dim)];
  const int64_t rows = serried::chunk(size, world, 0).size;
  const int64_t num_full = member.dim == 0 && rows > 0 ? size / rows : 0;
  if (num_full > 0) {  // all of them by one copy
    c10::DimVector sizes = {num_full, rows}, strides = {length};
    sizes.append(member.sizes.begin() + 1, member.sizes.end());
    const c10::DimVector inner = serried::contiguous_strides(c10::IntArrayRef(sizes).slice(1));
    strides.append(inner.begin(), inner.end());
    const at::Tensor full =
        num_full == world && size == world * rows ? gradient : gradient.narrow(0, 0, num_full * rows);
    at::as_strided(round.buffer, sizes, strides, round.buffer.storage_offset() + member.offset)
        .copy_(full.unflatten(0, {num_full, rows}));
  }
  for (int64_t r = num_full; r < world; ++r) {
    const Span span = serried::chunk(size, world, r);
    if (span.size == 0) continue;
    const at::Tensor part = gradient.narrow(member.dim, span.begin, span.size);
    round.buffer.narrow(0, r * length + member.offset, part.numel()).view(part.sizes()).copy_(part);
  }
}

// What is kept from one call to the next is no tensor that a graph knows of; within one call it is. A call that leaves
// some behind is refused as any that leaves a tensor of its own.
void Block::check_recordable() const {
  const bool found_some = std::any_of(members_.begin(), members_.end(), [](const BlockMember& member) {
    return member.kept.defined() && member.kept_in != tape::num_recordings();
  });
  if (setting_.all_reduces && !found_some && !partial_.defined()) return;
  raise<c10::NotImplementedError>(
      {"capture",
       c10::str("the function adds to gradients of ", text(),
                " that an earlier call has left there under no_sync() or set_requires_all_reduce(false)"),
       "capture all micro-batches as one function, of which the last one reduces, or run them eagerly"});
}

void Block::on_gradient(size_t index, const at::Tensor& gradient) {
  if (at::GradMode::is_enabled() && gradient.defined() && gradient.requires_grad()) refuse_graph(members_[index].name);
  const at::NoGradGuard no_grad;
  context_->watch_backward();
  BlockMember& member = members_[index];
  if (tape::is_replayed()) check_recordable();
  const bool sums_later = may_sum_later(member, gradient);
  at::Tensor plain = gradient.defined() && !sums_later ? plain_gradient(member, gradient) : at::Tensor();
  if (!setting_.reduces) {
    if (plain.defined()) keep(member, plain);
    return;
  }
  Round& round = round_of(torch::autograd::get_current_graph_task_id());
  if (plain.defined() && member.kept.defined()) {
    keep(member, plain);
    plain = std::move(member.kept);
    member.kept = at::Tensor();
  }
  if (plain.defined()) put(round, index, plain);
  if (sums_later) {
    const DTensorMeta& meta = *dtensor_meta(gradient);
    round.unsummed.push_back({index, gradient, wrap(meta.local, meta.spec)});
  }
  round.has_gradient[index] = plain.defined() || sums_later;
  round.is_awaited[index] = false;
  if (any_of(round.is_awaited)) return;
  Round complete = std::move(round);
  std::erase_if(rounds_, [&](const Round& each) { return each.task == complete.task; });
  finish(std::move(complete));
}

// What this backward did not bring: earlier ones may have kept it, else it is zero.
void Block::complete_buffer(Round& round) {
  const LocalOnly local_only;
  for (size_t i = 0; i < members_.size(); ++i) {
    BlockMember& member = members_[i];
    if (round.has_gradient[i]) continue;
    if (member.kept.defined()) {
      put(round, i, member.kept);
      member.kept = at::Tensor();
      round.has_gradient[i] = true;
    } else {
      round.buffer.view({world_size(), gradient_length()}).narrow(1, member.offset, member.chunk).zero_();
    }
  }
}

// A graph was recorded with one set of gradients and keeps to it, so that its replays need no flags.
void Block::write_flags(const Round& round) {
  const tape::Pause off_tape;
  const LocalOnly local_only;
  if (!flags_.defined() || flagged_ != round.has_gradient) {
    std::vector<float> flags(round.has_gradient.begin(), round.has_gradient.end());
    flags.push_back(float(number_ + 1));
    flags_ = at::tensor(flags).to(round.buffer.options()).unsqueeze(0);
    flagged_ = round.has_gradient;
  }
  round.buffer.view({world_size(), gradient_length()}).narrow(1, shard_length_, flags_.size(1)).copy_(flags_);
}

std::vector<bool> Block::read_flags(const Reduction& reduction) const {
  const at::Tensor& reduced = reduction.result;
  if (tape::is_replayed()) {
    check_used_alike(reduction);
    return reduction.round.has_gradient;
  }
  std::vector<bool> has_gradient(members_.size());
  for (size_t i = 0; i < members_.size(); ++i) has_gradient[i] = number_at(reduced, shard_length_ + int64_t(i)) > 0;
  return has_gradient;
}

// Every rank sees a flag that is neither that of none nor that of all.
void Block::check_used_alike(const Reduction& reduction) const {
  const tape::Pause off_tape;
  const at::Tensor& reduced = reduction.result;
  if (!reduced.device().is_cpu() || setting_.hooks.reduce_scatter || place_.shard_group->getBackendName() == "fake") {
    return;
  }
  const double of_all =
      reduction.is_sum ? double(num_ranks()) / (reduced.scalar_type() == at::kHalf ? early_divisor(num_ranks()) : 1)
                       : 1;
  for (size_t i = 0; i < members_.size(); ++i) {
    const double used = number_at(reduced, shard_length_ + int64_t(i));
    if (used == 0 || used == of_all) continue;
    raise<c10::NotImplementedError>(
        {"capture",
         c10::str(members_[i].name, " of ", text(), " got a gradient on some ranks only, this rank ",
                  reduction.round.has_gradient[i] ? "among them" : "not among them"),
         "use the same parameters on every rank, or run this step eagerly"});
  }
}

int64_t Block::num_ranks() const {
  return world_size() * (place_.replica_group ? place_.replica_group->getSize() : 1);
}

void Block::start_reduction(Reduction& reduction, bool async) const {
  const LocalOnly local_only;
  const at::Tensor& buffer = reduction.round.buffer;
  const bool is_half = buffer.scalar_type() == at::kHalf;
  const double early = is_half ? early_divisor(num_ranks()) : 1;
  reduction.is_sum = is_half || setting_.sums || setting_.divide_factor.has_value();
  reduction.factor = setting_.divide_factor.value_or(double(num_ranks())) / early;
  const auto op = share(reduction.is_sum ? c10d::ReduceOp::SUM : c10d::ReduceOp::AVG);
  if (early != 1) buffer.div_(early);
  reduction.result = at::empty({gradient_length()}, buffer.options());
  if (setting_.hooks.reduce_scatter) {
    return setting_.hooks.reduce_scatter(reduction.result, buffer, place_.shard_group, *op);
  }
  ops::reduce_scatter_into(reduction.result, buffer, place_.shard_group, op, async ? &reduction.work : nullptr);
}

// Gradients of blocks of equal sizes would be averaged with each other in silence. Sums in low precision do not tell.
void Block::check_same_blocks(const at::Tensor& reduced, bool is_sum) const {
  const bool is_exact = reduced.scalar_type() == at::kFloat || reduced.scalar_type() == at::kDouble;
  if (!is_exact || tape::is_replayed() || setting_.hooks.reduce_scatter) return;
  if (place_.shard_group->getBackendName() == "fake") return;
  const double number =
      number_at(reduced, shard_length_ + int64_t(members_.size())) / (is_sum ? double(world_size()) : 1);
  if (std::abs(number - double(number_ + 1)) < 0.01) return;
  raise<c10::ValueError>(
      {"backward",
       c10::str("other ranks reduce the gradients of another block while this rank reduces those of ", text()),
       "run the same blocks in the same order on every rank, in backward, too"});
}

void Block::finish(Round round) {
  const comm_debug::OnBehalf scope([&](auto add) { name_parameters(add); });
  const OrdinaryMode ordinary;
  ++context_->num_reductions;
  const bool async = place_.overlaps && !tape::is_replayed() && !setting_.hooks.reduce_scatter;
  Reduction reduction{.round = std::move(round)};
  try {
    sum_up(reduction.round);
    complete_buffer(reduction.round);
    write_flags(reduction.round);
    start_reduction(reduction, async);
  } catch (c10::Error& error) {
    context_->gradients.give_back(std::move(reduction.round.buffer));
    error.add_context("while the gradients of " + text() + " were reduced");
    throw;
  } catch (...) {  // a user's hook
    context_->gradients.give_back(std::move(reduction.round.buffer));
    throw;
  }
  if (!async) return complete(std::move(reduction));
  context_->add_reduction(*this, reduction.round.task);
  reductions_.push_back(std::move(reduction));
}

void Block::settle(int task) {
  const auto found = std::find_if(reductions_.begin(), reductions_.end(),
                                  [&](const Reduction& each) { return each.round.task == task; });
  if (found == reductions_.end()) return;
  Reduction reduction = std::move(*found);
  reductions_.erase(found);
  complete(std::move(reduction));
}

// False where it is kept for a backward that reduces over the replicas, too.
bool Block::reduce_over_replicas(at::Tensor& result, bool is_sum) {
  if (!place_.replica_group) return true;
  if (partial_.defined()) result.add_(std::exchange(partial_, at::Tensor()));
  if (!setting_.all_reduces) {
    partial_ = std::move(result);
    return false;
  }
  ops::all_reduce_(result, place_.replica_group, share(is_sum ? c10d::ReduceOp::SUM : c10d::ReduceOp::AVG));
  return true;
}

void Block::complete(Reduction reduction) {
  const comm_debug::OnBehalf scope([&](auto add) { name_parameters(add); });
  const at::NoGradGuard no_grad;
  const OrdinaryMode ordinary;
  const Borrowed buffer(context_->gradients, std::move(reduction.round.buffer));
  at::Tensor& result = reduction.result;
  try {
    if (reduction.work) reduction.work->wait();
    reduction.work.reset();
    check_same_blocks(result, reduction.is_sum);
    const LocalOnly local_only;
    // Not the flags behind them, which would vanish in half precision.
    if (reduction.is_sum) result.narrow(0, 0, shard_length_).div_(reduction.factor);
    if (!reduce_over_replicas(result, reduction.is_sum)) return;
  } catch (c10::Error& error) {
    reduction.work.reset();
    error.add_context("while the gradients of " + text() + " were reduced");
    throw;
  }
  const std::vector<bool> has_gradient = read_flags(reduction);
  if (setting_.hooks.reduced) setting_.hooks.reduced(result.narrow(0, 0, shard_length_), place_.shard_group);
  for (size_t i = 0; i < members_.size(); ++i) {
    if (has_gradient[i]) give(members_[i], result);
  }
}

void Block::give(BlockMember& member, const at::Tensor& reduced) const {
  const at::Tensor parameter(member.parameter.lock());
  if (!parameter.defined() || !parameter.requires_grad()) return;
  const int64_t length = c10::multiply_integers(member.local_sizes);
  at::Tensor part = reduced.narrow(0, member.offset, length).view(member.local_sizes);
  if (part.scalar_type() != member.spec->dtype) part = part.to(member.spec->dtype);
  at::Tensor gradient = wrap(std::move(part), member.spec);
  set_use(gradient, use_like_parameters());
  at::Tensor& kept = parameter.mutable_grad();
  if (kept.defined()) {
    kept.add_(gradient);
  } else {
    kept = std::move(gradient);
  }
  auto& then = torch::autograd::impl::post_acc_grad_hooks(parameter);
  if (then != nullptr) (*then)(parameter);
}

// Their Works keep the memory until they are done.
void Block::drop_reductions(int task) {
  for (Reduction& each : reductions_) {
    if (each.round.task == task) context_->gradients.give_back(std::move(each.round.buffer));
  }
  std::erase_if(reductions_, [&](const Reduction& each) { return each.round.task == task; });
}

void Block::end_backward(int task, bool completed) {
  const at::NoGradGuard no_grad;
  std::vector<Round> left;
  for (Round& round : rounds_) {
    if (round.task == task) left.push_back(std::move(round));
  }
  std::erase_if(rounds_, [&](const Round& round) { return round.task == task; });
  if (!completed) {
    for (Round& round : left) context_->gradients.give_back(std::move(round.buffer));
    drop_reductions(task);
    return;
  }
  for (Round& round : left) finish(std::move(round));
  const bool has_kept = (partial_.defined() && setting_.all_reduces) ||
                        std::any_of(members_.begin(), members_.end(), [](const auto& m) { return m.kept.defined(); });
  if (!has_kept || !setting_.reduces) return;
  // Reached by earlier backwards only.
  Round late = std::move(round_of(task));
  std::erase_if(rounds_, [&](const Round& round) { return round.task == task; });
  finish(std::move(late));
}

}  // namespace serried::detail
