// Collectives as others see them later: entries of the black box, and slices of the trace on a track of their group,
// beside what the threads of their rank do meanwhile.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <memory>
#include <utility>

#include "serried/base/trace_slices.h"
#include "serried/comm/collectives/own_backend.h"
#include "serried/comm/collectives/watch.h"

namespace serried::detail {

/// A call on its way, from where it was made until it is done, on whichever thread that is.
class TracedCall {
 public:
  TracedCall(const c10d::Backend& backend, const watch::Record& record);

  /// The how-many-th collective of its group it is, by which calls of all ranks are brought together.
  void set_sequence(uint64_t sequence) { sequence_.store(sequence, std::memory_order_relaxed); }
  void end(bool failed = false);

 private:
  friend class SeenWait;
  std::vector<trace::Note> identity() const;

  const std::string name_;
  const std::string group_;
  trace::Slice slice_;
  std::atomic<uint64_t> sequence_;
};
using TracedCallPtr = std::shared_ptr<TracedCall>;

/// A call in the black box and, where one is made, in the trace. By value; by default it is no call.
class SeenCall {
 public:
  SeenCall() = default;
  SeenCall(black_box::CallLog log, TracedCallPtr traced) : log_(log), traced_(std::move(traced)) {}

  /// Its turn has come, as the how-many-th collective of its group; `at_once`: it never waited for it.
  void begin(uint64_t sequence, bool at_once = false) const {
    log_.begin(sequence, at_once);
    if (traced_ != nullptr) traced_->set_sequence(sequence);
  }
  /// Once, as far as the trace is concerned.
  void end(bool failed = false) const {
    log_.end(failed);
    if (traced_ != nullptr) traced_->end(failed);
  }

 private:
  friend class SeenWait;
  black_box::CallLog log_;
  TracedCallPtr traced_;  // null: nothing is traced
};

/// `record` has just been asked for.
inline SeenCall see_call(const OwnBackend& backend, const watch::Record& record) {
  return {backend.log().issue(record),
          trace::enabled() ? std::make_shared<TracedCall>(backend, record) : TracedCallPtr()};
}

/// While it lives, this thread waits for `call`.
class SeenWait {
 public:
  explicit SeenWait(SeenCall call) : call_(std::move(call)), begin_ns_(call_.traced_ == nullptr ? 0 : trace::now_ns()) {
    call_.log_.begin_wait();
  }
  ~SeenWait() {
    call_.log_.end_wait();
    if (call_.traced_ != nullptr) trace_end();
  }
  SeenWait(const SeenWait&) = delete;
  SeenWait& operator=(const SeenWait&) = delete;

 private:
  void trace_end() const;

  const SeenCall call_;
  const int64_t begin_ns_;
};

/// Runs `call`, which blocks. It begins the SeenCall that it gets, unless `record` has its sequence already.
template <class Call>
void run_seen(const OwnBackend& backend, const watch::Record& record, Call run) {
  const SeenCall seen = see_call(backend, record);
  if (record.sequence != 0) seen.begin(record.sequence, /*at_once=*/true);
  struct End {
    ~End() { seen.end(!done); }
    const SeenCall& seen;
    bool done = false;
  } at_end{seen};
  if (!trace::enabled()) [[likely]] {
    run(seen);
  } else {
    const SeenWait waiting(seen);
    run(seen);
  }
  at_end.done = true;
}

}  // namespace serried::detail
