// The queue, its thread, and the Work of a call that has not begun.
#include "serried/comm/backends/gloo/compared_calls.h"

#include <bit>
#include <cstring>
#include <deque>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/ops/empty.h>
#include <c10/util/StringUtil.h>

#include "serried/base/error.h"
#include "serried/comm/backends/gloo/work.h"

namespace serried::gloo {

using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;
using watch::Record;

/// Only its future is asked for: the watch is around it.
class ComparedWork : public c10d::Work {
 public:
  ComparedWork() : Work(-1, c10d::OpType::UNKNOWN) {}

  bool isCompleted() override { return future_->completed(); }
  bool isSuccess() const override { return future_->completed() && !future_->hasError(); }
  bool wait(std::chrono::milliseconds) override {
    future_->wait();
    return true;
  }
  void synchronize() override {}
  void abort() override {}
  FuturePtr getFuture() override { return future_; }

  void finish(c10::ivalue::Future& inner) {
    if (inner.hasError()) return finish(inner.exception_ptr());
    future_->markCompleted(inner.value());
  }
  void finish(std::exception_ptr error) { future_->setError(std::move(error)); }
  void finish() { future_->markCompleted(std::vector<at::Tensor>()); }

 private:
  const FuturePtr future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
};

/// One that waits for the records of all ranks.
struct ComparedCall {
  Record record;
  std::chrono::milliseconds timeout;
  Issue issue;
  c10::intrusive_ptr<ComparedWork> work;
};

namespace {

std::vector<Record> gather_records(c10d::Backend& engine, const ComparedCall& call) {
  at::Tensor mine = at::empty({int64_t(sizeof(Record))}, at::kByte);
  std::memcpy(mine.mutable_data_ptr(), &call.record, sizeof(Record));
  at::Tensor all = at::empty({engine.getSize() * mine.numel()}, at::kByte);
  c10d::AllgatherOptions options;
  options.timeout = call.timeout;
  engine._allgather_base(all, mine, options)->wait();
  std::vector<Record> records(size_t(engine.getSize()));
  std::memcpy(records.data(), all.const_data_ptr(), records.size() * sizeof(Record));
  return records;
}

bool agree(const Record& a, const Record& b) {
  return watch::fingerprint(a) == watch::fingerprint(b) || watch::differ_in_knowledge(a, b);
}

/// Fails the group where two ranks disagree; the same two on every rank.
bool all_agree(const std::vector<Record>& records, const Record& before, detail::GroupStatus& status) {
  for (size_t r = 1; r < records.size(); ++r) {
    for (size_t lower = 0; lower < r; ++lower) {
      if (agree(records[lower], records[r])) continue;
      status.fail({watch::mismatch_text(int(lower), records[lower], int(r), records[r], before),
                   watch::mismatch_fix(records[lower], records[r])});
      return false;
    }
  }
  return true;
}

}  // namespace

class ComparedCalls::Queue {
 public:
  Queue(c10::intrusive_ptr<c10d::Backend> engine, std::shared_ptr<OpenCalls> calls)
      : engine_(std::move(engine)), calls_(std::move(calls)) {}

  static void start(const std::shared_ptr<Queue>& queue) {
    queue->thread_ = std::thread([queue] { queue->run(); });
  }

  void add(ComparedCall call) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      calls_waiting_.push_back(std::move(call));
    }
    changed_.notify_one();
  }

  void stop() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopped_ = true;
    }
    changed_.notify_one();
    // One that waits for a rank that never comes is left behind with the engine, until its timeout.
    if (on_engine_thread() || calls_->status().failed()) {
      thread_.detach();
    } else {
      thread_.join();
    }
  }

 private:
  void run() {
    while (true) {
      ComparedCall call;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [this] { return stopped_ || !calls_waiting_.empty(); });
        if (calls_waiting_.empty()) return;
        call = std::move(calls_waiting_.front());
        calls_waiting_.pop_front();
      }
      try {
        make(call);
      } catch (...) {
        call.work->finish(std::current_exception());
      }
    }
  }

  void make(const ComparedCall& call) {
    detail::GroupStatus& status = calls_->status();
    if (status.failed()) raise_unusable(status, call.record);
    if (!all_agree(gather_records(*engine_, call), before_, status)) raise_failure(status, call.record);
    before_ = call.record;
    const c10::intrusive_ptr<c10d::Work> made = call.issue(*engine_);
    if (!made) return call.work->finish();
    made->getFuture()->addCallback([work = call.work](c10::ivalue::Future& inner) { work->finish(inner); });
  }

  const c10::intrusive_ptr<c10d::Backend> engine_;
  const std::shared_ptr<OpenCalls> calls_;
  Record before_;  // of the thread alone
  std::thread thread_;
  std::mutex mutex_;  // guards all below
  std::condition_variable changed_;
  std::deque<ComparedCall> calls_waiting_;
  bool stopped_ = false;
};

ComparedCalls::ComparedCalls(c10::intrusive_ptr<c10d::Backend> engine, std::shared_ptr<OpenCalls> calls)
    : queue_(std::make_shared<Queue>(std::move(engine), std::move(calls))) {
  Queue::start(queue_);
}

ComparedCalls::~ComparedCalls() {
  queue_->stop();
}

c10::intrusive_ptr<c10d::Work> ComparedCalls::add(const Record& record, std::chrono::milliseconds timeout,
                                                  Issue issue) {
  auto work = c10::make_intrusive<ComparedWork>();
  queue_->add({record, timeout, std::move(issue), work});
  return work;
}

}  // namespace serried::gloo
