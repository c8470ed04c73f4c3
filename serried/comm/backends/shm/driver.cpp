// One engine, one user at a time: the caller itself, a waiting caller, or a thread for works nobody waits for.
#include "serried/comm/backends/shm/driver.h"

#include <sched.h>

#include <algorithm>
#include <utility>

#include <ATen/core/ivalue.h>

#include "serried/base/error.h"
#include "serried/base/interrupt.h"

namespace serried::shm {
namespace {

// Long enough to meet peers that issue the same call now, short enough not to hold up the caller's own work.
constexpr int kMeetingSpins = 400;

}  // namespace

void run(Runner& engine, Op& op) {
  engine.arrive(op);
  engine.complete(op);
}

CollectiveWork::CollectiveWork(int rank, c10d::OpType type, const detail::Profiled& profiled, uint64_t sequence,
                               Task task, std::shared_ptr<Driver> driver)
    : Work(rank, type, profiled.title(), profiled.inputs()),
      task_(std::move(task)),
      sequence_(sequence),
      run_by_(driver),
      driver_(std::move(driver)) {}

bool CollectiveWork::isCompleted() {
  std::lock_guard<std::mutex> lock(mutex_);
  return completed_;
}

bool CollectiveWork::wait(std::chrono::milliseconds timeout) {
  std::shared_ptr<Driver> driver;
  {
    std::lock_guard<std::mutex> lock(future_mutex_);
    driver = driver_;
  }
  if (driver) driver->home().require("wait");
  const detail::SeenWait waiting(task_.seen);
  // With a timeout of its own the caller must be free to give up, so it does not take the engine.
  if (timeout == kNoTimeout) {
    if (driver) driver->help(*this);
    wait_until_done();
    const bool is_success = Work::wait();
    if (const std::shared_ptr<Driver> alive = run_by_.lock()) alive->wait_until_let_go(*this);
    return is_success;
  }
  std::unique_lock<std::mutex> lock(mutex_);
  if (!cv_.wait_for(lock, timeout, [this] { return completed_; })) {
    raise<c10::DistBackendError>({"wait", c10::str("timed out after ", timeout.count(), " ms; the collective goes on"),
                                  "wait again, or pass a longer timeout"});
  }
  if (exception_) std::rethrow_exception(exception_);
  return true;
}

/// Another thread runs it. Where this one may be told to give up, it looks now and then whether it has been.
void CollectiveWork::wait_until_done() {
  if (!interrupt::is_possible()) return;  // Work::wait does
  std::unique_lock<std::mutex> lock(mutex_);
  while (!cv_.wait_for(lock, kWaitSlice, [this] { return completed_; })) {
    lock.unlock();
    try {
      interrupt::check();
    } catch (...) {
      if (const std::shared_ptr<Driver> driver = run_by_.lock()) driver->interrupted();
      throw;
    }
    lock.lock();
  }
}

c10::intrusive_ptr<c10::ivalue::Future> CollectiveWork::getFuture() {
  std::lock_guard<std::mutex> lock(future_mutex_);
  if (future_) return future_;
  future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
  if (!done_) return future_;
  if (exception_)
    future_->setError(exception_);
  else
    future_->markCompleted(c10::IValue(task_.outputs));
  return future_;
}

bool CollectiveWork::has_future() {
  std::lock_guard<std::mutex> lock(future_mutex_);
  return future_.defined();
}

std::vector<at::Tensor> CollectiveWork::result() {
  return task_.outputs;
}

void CollectiveWork::mark_done(std::exception_ptr error) {
  task_.keep_alive.clear();
  task_.after = nullptr;
  task_.program = nullptr;
  task_.seen.end(error != nullptr);
  finish(error);
}

/// Callbacks of the future run here, without any lock of ours and with the engine free: they may use the group.
void CollectiveWork::call_back() {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  std::shared_ptr<Driver> driver;
  {
    std::lock_guard<std::mutex> lock(future_mutex_);
    done_ = true;
    future = future_;
    driver.swap(driver_);
  }
  if (!future) return;
  if (exception_)
    future->setError(exception_);
  else
    future->markCompleted(c10::IValue(task_.outputs));
}

Driver::Driver(std::unique_ptr<Runner> engine) : engine_(std::move(engine)) {}

Driver::~Driver() {
  close(std::chrono::milliseconds(0));
}

void Driver::enter(const Op& op) const {
  const char* where = watch::kind_name(op.record.kind);
  home_.require(where);
  if (stop_) raise<c10::DistBackendError>({where, "the group is closed", "make a new group"});
}

void Driver::issue(const c10::intrusive_ptr<CollectiveWork>& work, Now now) {
  Lock lock(mutex_);
  enter(work->task_.op);
  ++num_issued_;
  if (now == Now::always) {
    take_turn(lock);
    lock.unlock();
    work->mark_done(execute(*engine_, *work));
    lock.lock();
    end_turn(lock);
    return work->call_back();
  }
  if (now == Now::if_peers_are_there && !busy_ && queue_.empty()) return try_now(work, lock);
  queue_.push_back(work);
  if (!thread_.joinable()) start_thread();
  changed_.notify_all();
}

/// Arrives, and goes on if the peers come at once; else the work is first in the queue.
void Driver::try_now(const c10::intrusive_ptr<CollectiveWork>& work, Lock& lock) {
  busy_ = true;
  lock.unlock();
  bool due = false;
  std::exception_ptr error;
  try {
    work->task_.seen.begin(engine_->sequence() + 1, /*at_once=*/true);
    engine_->arrive(work->task_.op);
    work->arrived_ = true;
    for (int i = 0; i < kMeetingSpins && !due; ++i) {
      due = engine_->all_have_arrived(work->task_.op);
      if (!due) cpu_relax();
    }
  } catch (...) {
    error = std::current_exception();
  }
  if (due) error = execute(*engine_, *work);
  if (due || error) work->mark_done(error);
  lock.lock();
  if (!due && !error) queue_.push_front(work);
  end_turn(lock);
  if (due || error) work->call_back();
}

std::exception_ptr Driver::execute(Runner& engine, CollectiveWork& work) {
  Task& task = work.task_;
  try {
    if (!work.arrived_) task.seen.begin(engine.sequence() + 1);
    if (task.program) {
      task.program(engine);
    } else {
      if (!work.arrived_) engine.arrive(task.op);
      engine.complete(task.op);
    }
    if (task.after) task.after();
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

// Everything issued before runs first.
void Driver::take_turn(Lock& lock) {
  while (busy_ || !queue_.empty()) {
    if (!busy_) {
      run_front(lock);
      continue;
    }
    ++num_waiting_;
    changed_.wait(lock, [this] { return !busy_; });
    --num_waiting_;
  }
  busy_ = true;
}

void Driver::end_turn(Lock& lock) {
  busy_ = false;
  if (!queue_.empty() && !thread_.joinable() && !stop_) start_thread();
  const bool notify = num_waiting_ > 0 || !queue_.empty();
  lock.unlock();
  if (notify) changed_.notify_all();
}

void Driver::run_front(Lock& lock) {
  c10::intrusive_ptr<CollectiveWork> work = queue_.front();
  const CollectiveWork* const held = work.get();
  queue_.pop_front();
  held_.push_back(held);
  busy_ = true;
  lock.unlock();
  work->mark_done(execute(*engine_, *work));
  lock.lock();
  busy_ = false;
  lock.unlock();
  changed_.notify_all();
  work->call_back();
  work.reset();
  lock.lock();
  std::erase(held_, held);
  if (num_waiting_ > 0) changed_.notify_all();
}

void Driver::run_now(Op& op, const detail::SeenCall& seen) {
  Lock lock(mutex_);
  enter(op);
  ++num_issued_;
  const bool at_once = !busy_ && queue_.empty();
  take_turn(lock);
  lock.unlock();
  std::exception_ptr error;
  try {
    seen.begin(engine_->sequence() + 1, at_once);
    run(*engine_, op);
  } catch (...) {
    error = std::current_exception();
  }
  lock.lock();
  end_turn(lock);
  if (error) std::rethrow_exception(error);
}

void Driver::interrupted() {
  engine_->abort(interrupt::reason(engine_->rank()));
}

void Driver::wait_for_issued() {
  Lock lock(mutex_);
  take_turn(lock);
  end_turn(lock);
}

void Driver::help(CollectiveWork& work) {
  Lock lock(mutex_);
  while (!busy_ && !queue_.empty() && !work.isCompleted()) run_front(lock);
}

// Callbacks may take long, and may wait for whoever waits here.
void Driver::wait_until_let_go(CollectiveWork& work) {
  Lock lock(mutex_);
  const auto is_let_go = [&] { return std::find(held_.begin(), held_.end(), &work) == held_.end(); };
  if (is_let_go() || work.has_future()) return;
  ++num_waiting_;
  changed_.wait(lock, is_let_go);
  --num_waiting_;
}

void Driver::close(std::chrono::milliseconds patience) {
  Lock lock(mutex_);
  stop_ = true;
  // The last owner may go in a callback that the thread itself runs: then another one goes on with what is open.
  const bool on_own_thread = thread_.get_id() == std::this_thread::get_id();
  if (on_own_thread) {
    thread_.detach();
    thread_ = std::thread();
    if (!queue_.empty()) start_thread();
  }
  changed_.notify_all();
  ++num_waiting_;
  const bool drained = changed_.wait_for(lock, patience, [this] { return !busy_ && queue_.empty(); });
  --num_waiting_;
  std::thread thread = std::exchange(thread_, std::thread());
  lock.unlock();
  if (!drained) {
    engine_->abort(c10::str("rank ", engine_->rank(), " closed the group while collectives were open"));
  }
  if (thread.joinable()) return thread.join();
  // There was no thread: works that nobody waits for would keep the driver, which keeps them.
  lock.lock();
  while (!busy_ && !queue_.empty()) run_front(lock);
}

/// Under the lock. The thread keeps the driver alive: it ends when the driver is closed and nothing is open.
void Driver::start_thread() {
  thread_ = start_helper_thread([self = shared_from_this(), label = rank_label()] {
    const ThreadRankLabel speaks_for(label);  // where ranks are threads
    self->run_thread();
  });
}

void Driver::run_thread() {
  Lock lock(mutex_);
  while (true) {
    ++num_waiting_;
    changed_.wait(lock, [this] { return (stop_ && queue_.empty()) || (!busy_ && !queue_.empty()); });
    --num_waiting_;
    if (queue_.empty()) return;
    run_front(lock);
  }
}

}  // namespace serried::shm
