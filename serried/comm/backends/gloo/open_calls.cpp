// Counting collectives, and the thread that wakes waiting sends and receives when their group fails.
#include "serried/comm/backends/gloo/open_calls.h"

#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <c10/util/StringUtil.h>

namespace serried::gloo {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

constexpr auto kPollInterval = 50ms;

// Polls the groups that send and receive; sleeps while there are none. One per process, made on the first such wait.
class Guard {
 public:
  static Guard& instance() {
    // Never destroyed: its thread may outlive static destruction.
    static Guard* guard = new Guard();
    return *guard;
  }

  void add(const std::shared_ptr<OpenCalls>& calls) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      groups_.push_back(calls);
    }
    changed_.notify_one();
  }

 private:
  Guard() { std::thread(&Guard::run, this).detach(); }

  void run() {
    while (true) {
      std::vector<std::shared_ptr<OpenCalls>> alive;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [this] { return !groups_.empty(); });
        std::erase_if(groups_, [](const auto& group) { return group.expired(); });
        for (const auto& group : groups_) alive.push_back(group.lock());
      }
      for (const auto& calls : alive) {
        if (!calls) continue;
        calls->find_lonely_waits();
        if (calls->status().failed() || calls->closed()) calls->abort_waits();
      }
      alive.clear();
      std::this_thread::sleep_for(kPollInterval);
    }
  }

  std::mutex mutex_;  // guards groups_
  std::condition_variable changed_;
  std::vector<std::weak_ptr<OpenCalls>> groups_;
};

}  // namespace

void OpenCalls::start() {
  std::lock_guard<std::mutex> lock(mutex_);
  ++num_open_;
}

void OpenCalls::land() {
  // Notified under the lock: the last landing may be what lets the destructor of this run.
  std::lock_guard<std::mutex> lock(mutex_);
  --num_open_;
  landed_.notify_all();
}

bool OpenCalls::drain(std::chrono::milliseconds timeout) {
  const auto deadline = Clock::now() + timeout;
  std::unique_lock<std::mutex> lock(mutex_);
  while (num_open_ > 0 && !status_->failed() && Clock::now() < deadline) landed_.wait_for(lock, kPollInterval);
  return num_open_ == 0;
}

void OpenCalls::add_wait(const std::shared_ptr<OpenCalls>& calls, c10d::Work* work, const watch::Record& record) {
  bool unknown = false;
  {
    std::lock_guard<std::mutex> lock(calls->mutex_);
    calls->waits_.emplace(work, record);
    unknown = !std::exchange(calls->guarded_, true);
  }
  if (unknown) Guard::instance().add(calls);
}

void OpenCalls::remove_wait(c10d::Work* work) {
  std::lock_guard<std::mutex> lock(mutex_);
  waits_.erase(work);
}

void OpenCalls::abort_waits() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [work, record] : waits_) work->abort();
}

void OpenCalls::find_lonely_waits() {
  std::string what;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [work, record] : waits_) {
      if (record.kind == watch::Kind::recv && record.root < 0) what = watch::describe(record);
    }
  }
  if (what.empty() || !status_->is_alone()) return;
  status_->fail({c10::str(what, " failed: nobody is left to send", status_->gone_text()),
                 "make a new group of the ranks that are left"});
}

void OpenCalls::close() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
  }
  abort_waits();
}

bool OpenCalls::closed() {
  std::lock_guard<std::mutex> lock(mutex_);
  return closed_;
}

}  // namespace serried::gloo
