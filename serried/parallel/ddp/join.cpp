// DistributedDataParallel on a rank that has no more input, and what it tells such ranks.
#include <c10/core/GradMode.h>

#include "serried/base/error.h"
#include "serried/parallel/ddp/ddp.h"
#include "serried/parallel/ddp/reducer.h"
#include "serried/parallel/sync_batchnorm.h"

namespace serried {
namespace {

// A forward is announced with what it shares; one that shares nothing is not.
enum JoinMessage : int64_t {
  kSharesNothing = 0,
  kRebuildsBuckets = 1,
  kSharesBuffers = 2,
  kBackward = 4,
  kSharesState = 8
};

}  // namespace

void DataParallelBase::join_begins(const JoinOptions& options) {
  if (has_sync_batchnorm(*wrapped_) && !options.throw_on_early_termination) {
    raise<c10::ValueError>({"join", "the module has SyncBatchNorm, whose statistics need the input of every rank",
                            "pass throw_on_early_termination = true, or use an ordinary BatchNorm"});
  }
  if (delayed_) {
    raise<c10::ValueError>({"join", "delay_all_reduce reduces at a point of backward that only ranks with input know",
                            "leave out delay_all_reduce"});
  }
  joined_ = true;
  join_options_ = options;
  reducer_->before_round([this] {
    if (const auto notice = notify_join(kBackward)) take_divisor(*notice);
  });
}

void DataParallelBase::join_ends() {
  reducer_->before_round(nullptr);
  reducer_->set_divisor(std::nullopt);
}

// The rank that buckets and buffers of the coming forward come from.
int DataParallelBase::announce_forward() {
  if (!in_join()) return 0;
  int64_t message = kSharesNothing;
  if (c10::GradMode::is_enabled() && sync_->gradients() && reducer_->is_rebuild_due()) message |= kRebuildsBuckets;
  if (will_sync_buffers()) message |= kSharesBuffers;
  if (shares_state()) message |= kSharesState;
  if (message == kSharesNothing && !join_options_.throw_on_early_termination) return 0;
  const auto notice = notify_join(message);
  return notice ? notice->source() : 0;
}

void DataParallelBase::take_divisor(const JoinNotice& notice) {
  if (!join_options_.divide_by_initial_world_size) reducer_->set_divisor(double(notice.active_ranks.size()));
}

void DataParallelBase::main_hook(const JoinNotice& notice) {
  if (notice.message == kBackward) {
    take_divisor(notice);
    return reducer_->shadow_backward();
  }
  if (notice.message & kSharesState) {
    notice_new_memory();
    share_state(notice.source());
  }
  if (notice.message & kRebuildsBuckets) reducer_->rebuild_buckets(notice.source());
  if (!(notice.message & kSharesBuffers)) return;
  if (!buffer_hook_) return sync_buffers(notice.source());
  for (const HookFuture& future : buffer_hook_(group_, buffers_to_sync())) future->waitAndThrow();
}

void DataParallelBase::post_hook(int last_joiner) {
  sync_state(last_joiner);
  // The same on every rank, whatever its last forward was.
  sync_->buffers_next = true;
}

at::Device DataParallelBase::join_device() const {
  return data_parallel_parameters()[0].device();
}

}  // namespace serried
