// Order of collectives and counts that do not depend on timing.
#include "serried/parallel/ddp/hooks/chain_queue.h"

#include <ATen/core/jit_type.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <numeric>
#include <vector>

#include "serried/comm/collectives/collectives.h"
#include "serried/parallel/ddp/hooks/steps.h"
#include "serried/tape/tape.h"

namespace serried::hooks::detail {

ChainQueue::~ChainQueue() {
  wait();
}

void ChainQueue::wait() {
  if (last_) last_->wait();
}

const Group& ChainQueue::group(const Group& parent) {
  if (parent_.is(parent)) return group_;
  wait();
  parent_ = KnownGroup(parent);
  std::vector<int> ranks(parent->getSize());
  std::iota(ranks.begin(), ranks.end(), 0);
  group_ = split_group(parent, {ranks});
  return group_;
}

HookFuture ChainQueue::run(const std::function<HookFuture()>& start) {
  if (!last_) last_ = ready({});
  const HookFuture mine = last_->thenAsync([start](c10::ivalue::Future&) { return start(); }, c10::TensorType::get());
  // Without the value: it would keep the bucket's memory.
  last_ = mine->then([](c10::ivalue::Future&) { return c10::IValue(); }, c10::NoneType::get());
  return mine;
}

int64_t Iterations::before(const Group& group, const c10d::GradBucket& bucket) {
  if (!group_.is(group)) {
    const tape::Pause no_part_of_a_step;  // once per group
    group_ = KnownGroup(group);
    const at::Tensor count = at::full({1}, count_, at::TensorOptions(bucket.getBuffer().device()).dtype(at::kLong));
    all_reduce_(count, group, c10d::ReduceOp::MAX);
    count_ = count.item<int64_t>();
  }
  const int64_t before = count_;
  if (bucket.isLast()) next();
  return before;
}

void Iterations::next() {
  ++count_;
  num_per_call_ = std::max(num_per_call_, num_in_call());
}

uint64_t Iterations::phase(int64_t start) {
  call_begin_ = count_;
  if (count_ >= start) return kFromThere;
  const int64_t left = start - count_;
  return left >= num_per_call_ ? kBefore : uint64_t(left) + kFromThere;
}

}  // namespace serried::hooks::detail
