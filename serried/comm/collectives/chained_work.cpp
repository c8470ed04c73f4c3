// Waiting, and what is left to do.
#include "serried/comm/collectives/chained_work.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <utility>

namespace serried::detail {

bool ChainedWork::wait(std::chrono::milliseconds timeout) {
  in_our_words(options_.where, options_.backend,
               [&] { inner_->wait(timeout == kNoTimeout ? options_.timeout : timeout); });
  do_what_is_left();
  return true;
}

c10::intrusive_ptr<c10::ivalue::Future> ChainedWork::getFuture() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!after_) return inner_->getFuture();
  }
  return inner_->getFuture()->then(
      [self = c10::intrusive_ptr<ChainedWork>::unsafe_reclaim_from_nonowning(this)](c10::ivalue::Future& done) {
        const c10::IValue value = done.value();  // raises what went wrong
        self->do_what_is_left();
        return value;
      },
      c10::ListType::create(c10::TensorType::get()));
}

void ChainedWork::do_what_is_left() {
  const std::lock_guard<std::mutex> lock(mutex_);
  const std::function<void()> step = std::exchange(after_, nullptr);
  if (!step) return;
  const at::AutoDispatchBelowADInplaceOrView below;
  step();
}

}  // namespace serried::detail
