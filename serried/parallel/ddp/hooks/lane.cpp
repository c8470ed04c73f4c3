// Order of collectives and counts that do not depend on timing.
#include "serried/parallel/ddp/hooks/lane.h"

#include <ATen/core/jit_type.h>
#include <ATen/ops/full.h>

#include <numeric>
#include <vector>

#include "serried/comm/collectives.h"
#include "serried/parallel/ddp/hooks/steps.h"

namespace serried::hooks::detail {

Lane::~Lane() {
  wait();
}

void Lane::wait() {
  if (last_) last_->wait();
}

c10d::ProcessGroup& Lane::group(const Group& parent) {
  if (parent_.is(parent)) return *group_;
  wait();
  parent_ = KnownGroup(parent);
  std::vector<int> ranks(parent->getSize());
  std::iota(ranks.begin(), ranks.end(), 0);
  group_ = split_group(parent, {ranks});
  return *group_;
}

HookFuture Lane::run(const std::function<HookFuture()>& start) {
  if (!last_) last_ = ready({});
  const HookFuture mine = last_->thenAsync([start](c10::ivalue::Future&) { return start(); }, c10::TensorType::get());
  // Without the value: it would keep the bucket's memory.
  last_ = mine->then([](c10::ivalue::Future&) { return c10::IValue(); }, c10::NoneType::get());
  return mine;
}

int64_t Iterations::before(const Group& group, const c10d::GradBucket& bucket) {
  if (!group_.is(group)) {
    group_ = KnownGroup(group);
    const at::Tensor count = at::full({1}, count_, at::TensorOptions(bucket.getBuffer().device()).dtype(at::kLong));
    all_reduce_(count, group, c10d::ReduceOp::MAX);
    count_ = count.item<int64_t>();
  }
  return bucket.isLast() ? count_++ : count_;
}

}  // namespace serried::hooks::detail
