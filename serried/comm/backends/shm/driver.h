// Runs the collectives of one rank in the order they were issued, on whichever thread is there first.
#pragma once

#include "serried/base/fork.h"
#include "serried/base/log.h"
#include "serried/comm/backends/shm/runner.h"
#include "serried/comm/collectives/profiled.h"
#include "serried/comm/collectives/traced.h"

#include <c10/util/thread_name.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace serried::shm {

class Driver;

/// A thread that goes on with what is open while nobody waits for it. None where the system gives no more threads:
/// whoever waits does the work himself.
template <class Fn>
std::thread start_helper_thread(Fn run) {
  try {
    return std::thread([run = std::move(run)] {
      c10::setThreadName("serried shm");
      run();
    });
  } catch (const std::exception& error) {
    log::warn_once(std::string("[shm] no thread of its own for what nobody waits for (") + error.what() +
                   "): asynchronous calls make progress only in wait()");
    return {};
  }
}

/// What a Work does: one Op, or a program of several that is run as one. `after` puts results where the caller wants
/// them.
struct Task {
  Op op;
  std::function<void(Runner&)> program;  // instead of op
  std::function<void()> after;
  std::vector<at::Tensor> keep_alive;
  std::vector<at::Tensor> outputs;
  detail::SeenCall seen;
};

/// Runs one Op to its end; blocks.
void run(Runner& engine, Op& op);

class CollectiveWork : public c10d::Work {
 public:
  CollectiveWork(int rank, c10d::OpType type, const detail::Profiled& profiled, uint64_t sequence, Task task,
                 std::shared_ptr<Driver> driver);

  /// Blocks; the waiting thread runs what is due if no other does.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  bool isCompleted() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  std::vector<at::Tensor> result() override;
  uint64_t getSequencenumber() const override { return sequence_; }

 private:
  friend class Driver;
  void mark_done(std::exception_ptr error);
  void call_back();
  bool has_future();
  void wait_until_done();

  Task task_;
  const uint64_t sequence_;
  const std::weak_ptr<Driver> run_by_;
  std::shared_ptr<Driver> driver_;  // dropped when done
  bool arrived_ = false;
  std::mutex future_mutex_;
  bool done_ = false;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

class Driver : public std::enable_shared_from_this<Driver> {
 public:
  explicit Driver(std::unique_ptr<Runner> engine);
  ~Driver();

  /// Whether the thread that issues a work runs it.
  enum class Now { no, if_peers_are_there, always };

  /// Takes the work; it may be done before this returns. Errors are the work's, raised by its wait; but a closed group
  /// and a forked child are refused at once.
  void issue(const c10::intrusive_ptr<CollectiveWork>& work, Now now);

  /// Runs `op` on this thread after everything issued before; blocks.
  void run_now(Op& op, const detail::SeenCall& seen);

  /// A thread that waited for a work was told to give up: so must all ranks.
  void interrupted();

  /// Blocks until everything issued so far is done.
  void wait_for_issued();

  /// Runs due work on this thread until `work` is done or another thread has taken over.
  void help(CollectiveWork& work);

  /// Once it is done: blocks until no other thread holds `work`, and with it the tensors of its caller, who may count
  /// their handles. Not where it has a future, which calls back.
  void wait_until_let_go(CollectiveWork& work);

  /// No work comes after this. Gives open works a bounded time, then aborts them.
  void close(std::chrono::milliseconds patience);

  Runner& engine() { return *engine_; }
  const HomeProcess& home() const { return home_; }
  uint64_t num_issued() const { return num_issued_; }

 private:
  using Lock = std::unique_lock<std::mutex>;

  void enter(const Op& op) const;
  void try_now(const c10::intrusive_ptr<CollectiveWork>& work, Lock& lock);
  void take_turn(Lock& lock);
  void end_turn(Lock& lock);
  void run_front(Lock& lock);
  static std::exception_ptr execute(Runner& engine, CollectiveWork& work);
  void start_thread();
  void run_thread();

  const HomeProcess home_;
  std::unique_ptr<Runner> engine_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<c10::intrusive_ptr<CollectiveWork>> queue_;
  std::vector<const CollectiveWork*> held_;  // that threads run, or have run and not let go of yet
  bool busy_ = false;                        // some thread has the engine
  bool stop_ = false;
  int num_waiting_ = 0;
  std::atomic<uint64_t> num_issued_{0};
  std::thread thread_;
};

}  // namespace serried::shm
