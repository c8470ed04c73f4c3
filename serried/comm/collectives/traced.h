// Collectives in the trace: each is a slice on a track of its group, beside what the threads of its rank do meanwhile.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <memory>
#include <utility>

#include "serried/base/trace_slices.h"
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
  friend class TracedWait;
  std::vector<trace::Note> identity() const;

  const std::string name_;
  const std::string group_;
  trace::Slice slice_;
  std::atomic<uint64_t> sequence_;
};
using TracedCallPtr = std::shared_ptr<TracedCall>;

/// Null where nothing is recorded.
inline TracedCallPtr trace_call(const c10d::Backend& backend, const watch::Record& record) {
  return trace::enabled() ? std::make_shared<TracedCall>(backend, record) : nullptr;
}

/// While it lives, this thread waits for `call`; null: it is not recorded.
class TracedWait {
 public:
  explicit TracedWait(const TracedCall* call) : call_(call), begin_ns_(call == nullptr ? 0 : trace::now_ns()) {}
  ~TracedWait() {
    if (call_ != nullptr) end();
  }
  TracedWait(const TracedWait&) = delete;
  TracedWait& operator=(const TracedWait&) = delete;

 private:
  void end() const;

  const TracedCall* call_;
  int64_t begin_ns_;
};

/// Runs `call`, which blocks and leaves the number of the collective in `record`.
template <class Call>
void run_traced(const c10d::Backend& backend, const watch::Record& record, Call run) {
  if (!trace::enabled()) [[likely]]
    return run();
  TracedCall traced(backend, record);
  const TracedWait waiting(&traced);
  bool done = false;
  struct End {
    ~End() {
      traced.set_sequence(record.sequence);
      traced.end(!done);
    }
    TracedCall& traced;
    const watch::Record& record;
    const bool& done;
  } const at_end{traced, record, done};
  run();
  done = true;
}

}  // namespace serried::detail
