// Waiting in slices, and turning what gloo says into what the watch knows.
#include "serried/comm/backends/gloo/work.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

#include <c10/util/StringUtil.h>

#include "serried/base/error.h"
#include "serried/base/fork.h"
#include "serried/comm/agree/says_that_it_waits.h"

namespace serried::gloo {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using detail::GroupStatus;

constexpr auto kSlice = 50ms;

int64_t ms_since(Clock::time_point then) {
  return std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - then).count();
}

std::string text_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::Error& e) {
    return e.what_without_backtrace();
  } catch (const std::exception& e) {
    return e.what();
  } catch (...) {
    return "unknown error";
  }
}

// gloo starts its texts with the path and line of its own source, and ends them with advice that the fix replaces.
std::string without_source(std::string text) {
  text = text.substr(0, text.find('\n'));
  text = text.substr(0, text.find(". This is typically"));
  const size_t end = text.find("] ");
  return text.starts_with("[/") && end != std::string::npos ? text.substr(end + 2) : text;
}

bool speaks_of_timeout(const std::string& text) {
  return text.find("imed out") != std::string::npos || text.find("timeout") != std::string::npos;
}

// "all_reduce" of "#5 all_reduce f32[3] sum"
std::string call_name(const watch::Record& record) {
  watch::Record bare;
  bare.kind = record.kind;
  const std::string text = watch::describe(bare);
  return text.substr(0, text.find(' '));
}

// Filled by the thread that runs the collective; the Work and the callback both hold it.
struct Completion {
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  std::exception_ptr error;

  void finish(std::exception_ptr why) {
    {
      std::lock_guard<std::mutex> lock(mutex);
      done = true;
      error = std::move(why);
    }
    changed.notify_all();
  }

  bool wait_for(std::chrono::milliseconds time) {
    std::unique_lock<std::mutex> lock(mutex);
    return changed.wait_for(lock, time, [this] { return done; });
  }

  bool is_done() {
    std::lock_guard<std::mutex> lock(mutex);
    return done;
  }
};

thread_local bool is_engine_thread = false;

using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

// Runs the epilogue once `inner` is complete; the future of its outputs.
FuturePtr chain(const FuturePtr& inner, Epilogue epilogue) {
  return inner->then(
      [epilogue = std::move(epilogue)](c10::ivalue::Future& future) -> c10::IValue {
        if (future.hasError()) std::rethrow_exception(future.exception_ptr());
        const at::NoGradGuard no_grad;
        const at::AutoDispatchBelowADInplaceOrView below;  // whoever started the call has counted what it writes
        epilogue.run();
        return epilogue.outputs;
      },
      c10::ListType::create(c10::TensorType::get()));
}

class CollectiveWork : public c10d::Work {
 public:
  CollectiveWork(c10::intrusive_ptr<c10d::Work> inner, std::shared_ptr<OpenCalls> calls, const Call& call,
                 Epilogue epilogue)
      : Work(-1, inner->retrieveOpType()),
        inner_(std::move(inner)),
        calls_(std::move(calls)),
        call_(call),
        future_(epilogue.run ? chain(inner_->getFuture(), std::move(epilogue)) : inner_->getFuture()) {
    calls_->start();
    future_->addCallback([completion = completion_, calls = calls_, seen = call.seen,
                          caller = std::this_thread::get_id()](c10::ivalue::Future& future) {
      // A future that is already complete calls back at once, here.
      if (std::this_thread::get_id() != caller) is_engine_thread = true;
      seen.end(future.hasError());
      completion->finish(future.hasError() ? future.exception_ptr() : nullptr);
      calls->land();
    });
  }

  ~CollectiveWork() override {
    if (!home_.is_here()) inner_.release();  // it may hold the last of the parent's connections
  }

  bool isCompleted() override { return completion_->is_done() || calls_->status().failed(); }
  bool isSuccess() const override { return completion_->is_done() && !completion_->error; }

  std::exception_ptr exception() const override {
    if (completion_->is_done()) return completion_->error;
    if (!calls_->status().failed()) return nullptr;
    try {
      raise_failure(calls_->status(), call_.record);
    } catch (...) {
      return std::current_exception();
    }
  }

  bool wait(std::chrono::milliseconds timeout) override {
    home_.require("wait");
    const detail::SeenWait waiting(call_.seen);
    const bool to_the_end = timeout == kNoTimeout || timeout >= call_.timeout;
    const auto limit = to_the_end ? call_.timeout : timeout;
    const auto began = Clock::now();
    auto slice = std::min<std::chrono::milliseconds>(kSlice, limit);
    detail::SaysThatItWaits says(calls_->status().page());
    while (!completion_->wait_for(slice)) {
      says.waits_in(call_.record.sequence, began);
      if (calls_->status().failed()) raise_failure(calls_->status(), call_.record);
      const auto left = limit - std::chrono::milliseconds(ms_since(began));
      if (left <= 0ms) raise_late(to_the_end);
      slice = std::min<std::chrono::milliseconds>(kSlice, left);
    }
    if (completion_->error) raise_broken(calls_->status(), call_, ms_since(issued_), text_of(completion_->error));
    return true;
  }

  std::vector<at::Tensor> result() override {
    wait(kNoTimeout);
    return future_->value().toTensorVector();
  }

  void synchronize() override { inner_->synchronize(); }
  int sourceRank() const override { return inner_->sourceRank(); }
  void abort() override { inner_->abort(); }
  FuturePtr getFuture() override { return future_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override { return inner_->getFutureResult(); }
  float getDuration() const override { return inner_->getDuration(); }
  uint64_t getSequencenumber() const override { return inner_->getSequencenumber(); }

 private:
  [[noreturn]] void raise_late(bool to_the_end) {
    GroupStatus& status = calls_->status();
    if (to_the_end) raise_broken(status, call_, ms_since(issued_), "timeout");
    // The caller asked for less than the collective may take: it goes on.
    const std::string text = status.missing_text(call_.record, ms_since(issued_));
    raise<c10::DistBackendError>({call_name(call_.record), text, watch::kMissingFix});
  }

  const HomeProcess home_;
  c10::intrusive_ptr<c10d::Work> inner_;
  const std::shared_ptr<OpenCalls> calls_;
  const Call call_;
  const FuturePtr future_;
  const Clock::time_point issued_ = Clock::now();
  const std::shared_ptr<Completion> completion_ = std::make_shared<Completion>();
};

[[noreturn]] void raise_closed(const watch::Record& record) {
  raise<c10::DistBackendError>({call_name(record),
                                c10::str("the group was dropped while this rank waited in ", watch::describe(record)),
                                "keep the group until its sends and receives are done"});
}

class PeerWork : public c10d::Work {
 public:
  PeerWork(c10::intrusive_ptr<c10d::Work> inner, std::shared_ptr<OpenCalls> calls, const Call& call)
      : Work(-1, inner->retrieveOpType()), inner_(std::move(inner)), calls_(std::move(calls)), call_(call) {}

  ~PeerWork() override {
    if (!home_.is_here()) inner_.release();
  }

  bool wait(std::chrono::milliseconds timeout) override {
    home_.require("wait");
    const detail::SeenWait waiting(call_.seen);
    GroupStatus& status = calls_->status();
    if (status.failed()) raise_unusable(status, call_.record);
    const auto began = Clock::now();
    // Of a group that is gone, what has come is still handed out.
    if (calls_->closed()) timeout = 1ms;
    OpenCalls::add_wait(calls_, inner_.get(), call_.record);
    std::string trouble;
    bool done = false;
    detail::SaysThatItWaits says(status.page());
    says.waits_for(call_.record.kind == watch::Kind::send, call_.record.root, began);
    try {
      done = inner_->wait(timeout == kNoTimeout ? call_.timeout : timeout);
    } catch (...) {
      trouble = text_of(std::current_exception());
    }
    calls_->remove_wait(inner_.get());
    // Nobody but the first who waits knows when it was done.
    if (done && !has_ended_.exchange(true)) call_.seen.end();
    if (done) return true;
    if (status.failed()) raise_failure(status, call_.record);
    if (calls_->closed()) raise_closed(call_.record);
    if (trouble.empty()) return false;
    raise_broken(status, call_, ms_since(began), trouble);
  }

  bool isCompleted() override { return inner_->isCompleted(); }
  bool isSuccess() const override { return inner_->isSuccess(); }
  std::exception_ptr exception() const override { return inner_->exception(); }
  std::vector<at::Tensor> result() override { return inner_->result(); }
  void synchronize() override { inner_->synchronize(); }
  int sourceRank() const override { return inner_->sourceRank(); }
  void abort() override { inner_->abort(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return inner_->getFuture(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override { return inner_->getFutureResult(); }
  float getDuration() const override { return inner_->getDuration(); }
  uint64_t getSequencenumber() const override { return inner_->getSequencenumber(); }

 private:
  const HomeProcess home_;
  c10::intrusive_ptr<c10d::Work> inner_;
  const std::shared_ptr<OpenCalls> calls_;
  const Call call_;
  std::atomic<bool> has_ended_{false};
};

// A connection closes a moment before its process counts as ended.
std::string gone_text_soon(const GroupStatus& status) {
  const auto deadline = Clock::now() + 100ms;
  std::string text = status.gone_text();
  while (text.empty() && !status.failed() && Clock::now() < deadline) {
    std::this_thread::sleep_for(5ms);
    text = status.gone_text();
  }
  return text;
}

}  // namespace

void raise_failure(GroupStatus& status, const watch::Record& record) {
  const detail::Failure failure = status.failure();
  raise<c10::DistBackendError>({call_name(record), failure.what, failure.fix});
}

void raise_unusable(GroupStatus& status, const watch::Record& record) {
  raise<c10::DistBackendError>({call_name(record), c10::str("this group is unusable since: ", status.failure().what),
                                "make a new group; the failure above came first"});
}

void raise_broken(GroupStatus& status, const Call& call, int64_t waited_ms, const std::string& text) {
  if (speaks_of_timeout(text)) {
    status.fail({status.missing_text(call.record, waited_ms), watch::kMissingFix});
  } else {
    const std::string gone = gone_text_soon(status);
    status.fail({c10::str(watch::describe(call.record), " failed: ", without_source(text), gone),
                 gone.empty() ? "look for the rank that failed first, then make a new group"
                              : "make a new group of the ranks that are left"});
  }
  raise_failure(status, call.record);
}

c10::intrusive_ptr<c10d::Work> watch_collective(c10::intrusive_ptr<c10d::Work> inner, std::shared_ptr<OpenCalls> calls,
                                                const Call& call, Epilogue epilogue) {
  return c10::make_intrusive<CollectiveWork>(std::move(inner), std::move(calls), call, std::move(epilogue));
}

c10::intrusive_ptr<c10d::Work> watch_peer(c10::intrusive_ptr<c10d::Work> inner, std::shared_ptr<OpenCalls> calls,
                                          const Call& call) {
  return c10::make_intrusive<PeerWork>(std::move(inner), std::move(calls), call);
}

bool on_engine_thread() {
  return is_engine_thread;
}

}  // namespace serried::gloo
