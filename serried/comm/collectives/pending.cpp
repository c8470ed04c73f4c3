// Pendings: the result is asked for once and kept.
#include "serried/comm/collectives/pending.h"

#include <ATen/ThreadLocalState.h>

#include <atomic>
#include <exception>
#include <map>
#include <mutex>
#include <optional>
#include <utility>

#include "serried/base/error.h"
#include "serried/tape/tape.h"

namespace serried {
namespace detail {

class PendingState {
 public:
  virtual ~PendingState() = default;

  at::Tensor wait() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!is_done_) {
      try {
        result_ = finish();
      } catch (...) {
        error_ = std::current_exception();
      }
      is_done_ = true;
    }
    if (error_) std::rethrow_exception(error_);
    return result_;
  }

  bool ready() {
    const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
    return lock.owns_lock() && (is_done_ || is_there());  // else somebody waits
  }

 protected:
  virtual at::Tensor finish() = 0;
  virtual bool is_there() = 0;

 private:
  std::mutex mutex_;
  bool is_done_ = false;
  at::Tensor result_;
  std::exception_ptr error_;
};

class PendingParts {
 public:
  PendingParts(Pending whole, std::function<std::vector<at::Tensor>(const at::Tensor&)> cut)
      : whole_(std::move(whole)), cut_(std::move(cut)) {}

  const Pending& whole() const { return whole_; }
  std::vector<at::Tensor> wait() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!parts_) parts_ = cut_(whole_.wait());
    return *parts_;
  }

 private:
  const Pending whole_;
  const std::function<std::vector<at::Tensor>(const at::Tensor&)> cut_;
  std::mutex mutex_;
  std::optional<std::vector<at::Tensor>> parts_;
};

namespace {

uint32_t version_of(const at::Tensor& x) {
  return x.defined() && !x.is_inference() ? uint32_t(x._version()) : 0;
}

/// A tensor that a collective reads or writes, and what says whether somebody else has written it since.
class Untouched {
 public:
  explicit Untouched(Sent sent) : where_(sent.where), x_(std::move(sent.x)), version_(version_of(x_)) {}

  bool is_written() const { return version_of(x_) != version_; }
  std::string text() const { return watch::describe_tensor(x_); }
  const char* where() const { return where_; }

 private:
  const char* const where_;
  const at::Tensor x_;
  const uint32_t version_;
};

// Tensors of one memory may have one version between them, so of a part a write beside it looks like one to it.
bool is_part(const at::Tensor& x) {
  return x.is_view() || !x.has_storage() || x.storage().nbytes() != x.nbytes();
}

Untouched result_of(const StartedOp& started, const char* writes) {
  const at::Tensor& result = std::get<at::Tensor>(started);
  return Untouched(writes != nullptr && !is_part(result) ? Sent{writes, result} : Sent{});
}

const Untouched kMadeByTheCall{Sent{}};

bool has_landed(const StartedOp& started) {
  const WorkPtr& work = std::get<WorkPtr>(started);
  return !work || work->isCompleted();
}

at::Tensor landed(const StartedOp& started, const Untouched& sent, const Untouched& result) {
  // Asked before the end of the Work, which may copy into the result, and told after it, so that ranks stay in step.
  const bool sent_is_written = sent.is_written(), result_is_written = result.is_written();
  if (const WorkPtr& work = std::get<WorkPtr>(started)) work->wait();
  if (sent_is_written) {
    raise<c10::ValueError>({sent.where(), sent.text() + " was written while it was on its way to other ranks",
                            "write to it after wait(), or pass x.clone()"});
  }
  if (result_is_written) {
    raise<c10::ValueError>({result.where(), result.text() + " was written before wait(), by others than this call",
                            "write to it after wait()"});
  }
  return std::get<at::Tensor>(started);
}

class PendingOp final : public PendingState {
 public:
  PendingOp(StartedOp started, Sent sent, const char* writes)
      : started_(std::move(started)), sent_(std::move(sent)), result_(result_of(started_, writes)) {}

 private:
  at::Tensor finish() override { return landed(started_, sent_, result_); }
  bool is_there() override { return has_landed(started_); }

  const StartedOp started_;
  const Untouched sent_;
  const Untouched result_;
};

class PendingThen final : public PendingState {
 public:
  PendingThen(Pending first, std::function<at::Tensor(at::Tensor)> fn) : first_(std::move(first)), fn_(std::move(fn)) {}

 private:
  // Neither is needed afterwards, and both may hold much.
  at::Tensor finish() override {
    const Pending first = *std::exchange(first_, std::nullopt);
    return std::exchange(fn_, nullptr)(first.wait());
  }
  bool is_there() override { return first_->ready(); }

  std::optional<Pending> first_;
  std::function<at::Tensor(at::Tensor)> fn_;
};

class PendingStart final : public PendingState {
 public:
  PendingStart(Sent sent, Group group, std::function<bool()> is_known, std::function<StartedOp()> start)
      : sent_(std::move(sent)), group_(std::move(group)), is_known_(std::move(is_known)), start_(std::move(start)) {}

  /// Errors are those of the wait.
  void start_now() {
    const std::lock_guard<std::mutex> lock(start_mutex_);
    const auto start = std::exchange(start_, nullptr);
    if (!start) return;
    try {
      // With the caller's grad mode, whichever thread comes here first.
      const at::ThreadLocalStateGuard as_the_caller(callers_state_);
      started_ = start();
    } catch (...) {
      error_ = std::current_exception();
    }
  }

 private:
  at::Tensor finish() override {
    start_what_is_due(group_);  // those before it first
    start_now();                // waits if another thread does so
    if (error_) std::rethrow_exception(error_);
    return landed(started_, sent_, kMadeByTheCall);
  }
  bool is_there() override {
    {
      const std::lock_guard<std::mutex> lock(start_mutex_);
      if (start_ && !is_known_()) return false;
    }
    start_what_is_due(group_);
    start_now();
    return error_ != nullptr || has_landed(started_);
  }

  const Untouched sent_;
  const Group group_;
  const std::function<bool()> is_known_;
  const at::ThreadLocalState callers_state_;
  std::mutex start_mutex_;
  std::function<StartedOp()> start_;
  StartedOp started_;
  std::exception_ptr error_;
};

// What is due, by group; nearly always nothing.
struct DueTable {
  std::atomic<size_t> count{0};
  std::mutex mutex;
  std::map<const c10d::ProcessGroup*, std::vector<std::shared_ptr<PendingStart>>> by_group;
};

DueTable& due_table() {
  static auto* table = new DueTable();
  return *table;
}

}  // namespace

Pending pending(StartedOp started, Sent sent, const char* writes) {
  return Pending(std::make_shared<PendingOp>(std::move(started), std::move(sent), writes));
}

Pending pending_after(const char* where, const at::Tensor& x, const Group& group, std::function<bool()> is_known,
                      std::function<StartedOp()> start) {
  // In a recording it has its place where it is called.
  if (tape::is_recording() || is_known()) return pending(start(), {where, x});
  auto due = std::make_shared<PendingStart>(Sent{where, x}, group, std::move(is_known), std::move(start));
  DueTable& table = due_table();
  const std::lock_guard<std::mutex> lock(table.mutex);
  table.by_group[group.get()].push_back(due);
  ++table.count;
  return Pending(due);
}

PendingTensors pending_parts(Pending whole, std::function<std::vector<at::Tensor>(const at::Tensor&)> cut) {
  return PendingTensors(std::make_shared<PendingParts>(std::move(whole), std::move(cut)));
}

void start_what_is_due(const Group& group) {
  DueTable& table = due_table();
  if (table.count.load(std::memory_order_acquire) == 0) return;
  std::vector<std::shared_ptr<PendingStart>> due;
  {
    const std::lock_guard<std::mutex> lock(table.mutex);
    const auto found = table.by_group.find(group.get());
    if (found == table.by_group.end()) return;
    due = std::move(found->second);
    table.by_group.erase(found);
    table.count -= due.size();
  }
  for (const auto& one : due) one->start_now();
}

}  // namespace detail

at::Tensor Pending::wait() const {
  return state_->wait();
}

bool Pending::ready() const {
  return state_->ready();
}

Pending Pending::then(std::function<at::Tensor(at::Tensor)> fn) const {
  return Pending(std::make_shared<detail::PendingThen>(*this, std::move(fn)));
}

std::vector<at::Tensor> PendingTensors::wait() const {
  return state_->wait();
}

bool PendingTensors::ready() const {
  return state_->whole().ready();
}

Pending PendingTensors::then(std::function<at::Tensor(std::vector<at::Tensor>)> fn) const {
  return state_->whole().then([state = state_, fn = std::move(fn)](const at::Tensor&) { return fn(state->wait()); });
}

}  // namespace serried
