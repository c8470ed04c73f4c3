// Waiting, and the end of a call.
#include "serried/comm/backends/mpi/work.h"

#include <algorithm>
#include <thread>
#include <utility>

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>
#include <c10/util/StringUtil.h>

#include "serried/base/error.h"
#include "serried/comm/agree/says_that_it_waits.h"
#include "serried/comm/backends/mpi/lane.h"

namespace serried::mpi {
namespace {

using namespace std::chrono_literals;
using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr milliseconds kSlice = 50ms;

milliseconds since(Clock::time_point then) {
  return std::chrono::duration_cast<milliseconds>(Clock::now() - then);
}

}  // namespace

CallWork::CallWork(Plan plan, const gloo::Call& call, std::shared_ptr<Lane> lane)
    : plan_(std::move(plan)),
      call_(call),
      lane_(std::move(lane)),
      future_(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()))) {}

bool CallWork::wait_for(milliseconds slice) {
  // Nobody else moves calls while a callback of the driver waits.
  if (on_driver_thread()) {
    drive();
    std::this_thread::yield();
    return isCompleted();
  }
  std::unique_lock<std::mutex> lock(mutex_);
  return cv_.wait_for(lock, slice, [this] { return completed_; });
}

// The driver ends a collective that is late; a send or receive is late where somebody waits too long for it.
void CallWork::raise_late(milliseconds limit, bool to_the_end) {
  detail::GroupStatus& status = lane_->status();
  if (is_peer_call() || to_the_end) gloo::raise_broken(status, call_, limit.count(), "timeout");
  const std::string text = status.missing_text(call_.record, since(issued_).count());
  raise<c10::DistBackendError>({watch::kind_name(call_.record.kind), text, watch::kMissingFix});
}

bool CallWork::wait(milliseconds timeout) {
  home_.require("wait");
  const detail::SeenWait waiting(call_.seen);
  detail::GroupStatus& status = lane_->status();
  const bool to_the_end = timeout == kNoTimeout || timeout >= call_.timeout;
  const milliseconds limit = to_the_end ? call_.timeout : timeout;
  // The driver's clock starts later, when the call is the oldest of its group: it has the word for a while.
  const milliseconds patience = is_peer_call() || !to_the_end ? limit : 2 * limit + 5s;
  const auto began = Clock::now();
  detail::SaysThatItWaits says(status.page());
  while (!wait_for(std::min(kSlice, std::max(1ms, patience - since(began))))) {
    const bool sends = call_.record.kind == watch::Kind::send;
    is_peer_call() ? says.waits_for(sends, call_.record.root, began) : says.waits_in(call_.record.sequence, began);
    if (call_.record.kind == watch::Kind::recv && call_.record.root < 0 && status.is_alone()) {
      status.fail({c10::str(watch::describe(call_.record), " failed: nobody is left to send", status.gone_text()),
                   "make a new group of the ranks that are left"});
    }
    if (since(began) < patience) continue;
    if (status.failed()) gloo::raise_failure(status, call_.record);
    raise_late(limit, to_the_end);
  }
  if (exception_) std::rethrow_exception(exception_);
  return true;
}

std::vector<at::Tensor> CallWork::result() {
  wait();
  return plan_.outputs;
}

void CallWork::abort() {
  lane_->status().fail({c10::str("rank gave up ", watch::describe(call_.record)), "look at why that rank gave up"});
}

void CallWork::end(std::exception_ptr error) {
  if (!error && call_.record.kind == watch::Kind::recv && !progress.posted.statuses.empty()) {
    source_ = progress.posted.statuses.front().MPI_SOURCE;
  }
  if (!error && plan_.after) {
    try {
      const at::NoGradGuard no_grad;
      const at::AutoDispatchBelowADInplaceOrView below;  // whoever started the call has counted what it writes
      plan_.after();
    } catch (...) {
      error = std::current_exception();
    }
  }
  call_.seen.end(error != nullptr);
  finish(error);
  if (error) return future_->setError(error);
  future_->markCompleted(c10::IValue(plan_.outputs));
}

}  // namespace serried::mpi
