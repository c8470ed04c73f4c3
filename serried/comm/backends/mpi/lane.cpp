// Posting, testing and ending calls; one thread per process does it while any are open.
#include "serried/comm/backends/mpi/lane.h"

#include <algorithm>
#include <condition_variable>
#include <thread>
#include <utility>

#include <c10/util/StringUtil.h>

#include "serried/base/error.h"

namespace serried::mpi {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

// How long a group that is dropped waits for what its ranks have sent.
constexpr auto kFarewell = 2s;

thread_local bool is_driver_thread = false;

int64_t ms_since(Clock::time_point then) {
  return std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - then).count();
}

/// Calls that MPI may still read or write long after their group has failed, since no collective can be taken back.
void keep_for_ever(const CallPtr& call) {
  static auto* kept = new std::vector<CallPtr>();
  kept->push_back(call);
}

std::exception_ptr error_of(const Ended& end) {
  detail::GroupStatus* status = &end.lane->status();
  const gloo::Call& call = end.call->call();
  try {
    switch (end.how) {
      case Ended::How::done: return nullptr;
      case Ended::How::late: gloo::raise_broken(*status, call, end.waited_ms, "timeout");
      case Ended::How::broken:
        if (end.failure.what.empty()) gloo::raise_broken(*status, call, 0, end.text);
        status->fail(end.failure);
        gloo::raise_failure(*status, call.record);
      case Ended::How::group_failed: gloo::raise_failure(*status, call.record);
      case Ended::How::dropped:
        raise<c10::DistBackendError>(
            {watch::kind_name(call.record.kind),
             c10::str("the group was dropped while this rank waited in ", watch::describe(call.record)),
             "keep the group until its sends and receives are done"});
    }
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

/// Moves the calls of all groups; sleeps while there are none.
class Driver {
 public:
  static Driver& instance() {
    static auto* driver = new Driver();  // never destroyed: its thread may outlive static objects
    return *driver;
  }

  /// The caller has the turn.
  void add(const std::shared_ptr<Lane>& lane) {
    if (std::find(lanes_.begin(), lanes_.end(), lane) == lanes_.end()) lanes_.push_back(lane);
    num_idle_rounds_ = 0;
    work_.notify_one();
  }

  void round() {
    std::vector<Ended> ended;
    {
      const std::lock_guard<std::mutex> turn(turns());
      advance(ended);
    }
    tell(ended);
  }

  /// The caller has no turn: callbacks of users run here.
  void tell(std::vector<Ended>& ended) {
    for (Ended& each : ended) {
      each.call->end(error_of(each));
      if (each.call->is_peer_call()) continue;
      const std::lock_guard<std::mutex> turn(turns());
      each.lane->told();
      landed_.notify_all();
    }
    ended.clear();
  }

  std::condition_variable& landed() { return landed_; }

 private:
  Driver() {
    std::thread([this] { run(); }).detach();
  }

  void advance(std::vector<Ended>& ended) {
    for (const auto& lane : std::vector(lanes_)) lane->advance(ended);
    std::erase_if(lanes_, [](const auto& lane) { return lane->is_idle(); });
    num_idle_rounds_ = ended.empty() ? num_idle_rounds_ + 1 : 0;
  }

  void run() {
    is_driver_thread = true;
    while (true) {
      int idle = 0;
      {
        std::unique_lock<std::mutex> turn(turns());
        work_.wait(turn, [this] { return !lanes_.empty(); });
        idle = num_idle_rounds_;
      }
      round();
      rest(idle);
    }
  }

  // Answers come within microseconds or not soon: looks again at once for a while, then ever less often.
  static void rest(int idle) {
    constexpr int kEager = 200;
    if (idle < kEager) return std::this_thread::yield();
    std::this_thread::sleep_for(std::min<std::chrono::microseconds>(20us * (1 + (idle - kEager) / 8), 1ms));
  }

  // All under turns().
  std::condition_variable work_, landed_;
  std::vector<std::shared_ptr<Lane>> lanes_;
  int num_idle_rounds_ = 0;
};

}  // namespace

void drive() {
  Driver::instance().round();
}

bool on_driver_thread() {
  return is_driver_thread;
}

Lane::Lane(MPI_Comm comm, std::shared_ptr<detail::GroupStatus> status, int64_t piece_bytes)
    : comm_(comm), status_(std::move(status)), piece_bytes_(piece_bytes) {}

void Lane::add(const std::shared_ptr<Lane>& lane, CallPtr call) {
  std::vector<Ended> ended;
  {
    const std::lock_guard<std::mutex> turn(turns());
    lane->has_peer_calls_ |= call->is_peer_call();
    lane->open_.push_back(std::move(call));
    lane->advance(ended);
    if (!lane->is_idle()) Driver::instance().add(lane);
  }
  Driver::instance().tell(ended);
}

bool Lane::advance(std::vector<Ended>& ended) {
  if (status_->failed()) {
    give_up(ended, Ended::How::group_failed);
    return false;
  }
  bool may_begin = true;  // no collective before has steps that have not begun
  bool is_oldest = true;
  for (auto next = open_.begin(); next != open_.end();) {
    CallWork& call = **next;
    Ended end{*next, this};
    if (is_oldest && !call.is_peer_call()) {
      if (call.progress.first_seen == Clock::time_point()) call.progress.first_seen = Clock::now();
      is_oldest = false;
    }
    if (!step(call, may_begin, end)) {
      ++next;
      continue;
    }
    // A receive that was taken back is over for MPI too.
    if (end.how != Ended::How::done && end.how != Ended::How::dropped) {
      is_clean_ = false;
      keep_for_ever(*next);
    }
    num_untold_ += call.is_peer_call() ? 0 : 1;
    ended.push_back(std::move(end));
    next = open_.erase(next);
  }
  return !open_.empty();
}

// Whether the call has come to an end.
bool Lane::step(CallWork& call, bool& may_begin, Ended& end) {
  auto& progress = call.progress;
  try {
    while (progress.is_posted || call.is_peer_call() || may_begin) {
      if (!progress.is_posted) {
        progress.posted.piece_bytes = piece_bytes_;
        progress.is_posted = true;
        call.steps()[progress.step].post(comm_, progress.posted);
      }
      if (!test(call, end)) break;
      if (end.how != Ended::How::done || ++progress.step == call.steps().size()) return true;
      progress.posted = Posted();
      progress.is_posted = false;
    }
  } catch (const c10::Error& error) {
    end.how = Ended::How::broken;
    end.text = error.msg();
    return true;
  }
  if (call.is_peer_call()) return false;
  may_begin &= progress.is_posted && progress.step + 1 == call.steps().size();
  const bool is_late =
      progress.first_seen != Clock::time_point() && ms_since(progress.first_seen) > call.call().timeout.count();
  if (!is_late) return false;
  end.how = Ended::How::late;
  end.waited_ms = ms_since(progress.first_seen);
  return true;
}

// Whether the step is over, well or not.
bool Lane::test(CallWork& call, Ended& end) {
  Posted& posted = call.progress.posted;
  int done = 0;
  posted.statuses.resize(posted.requests.size());
  const int code = MPI_Testall(int(posted.requests.size()), posted.requests.data(), &done, posted.statuses.data());
  if (code != MPI_SUCCESS) {
    end.how = Ended::How::broken;
    end.text = text_of(code);
    for (const MPI_Status& status : posted.statuses) {
      const bool has_failed = status.MPI_ERROR != MPI_SUCCESS && status.MPI_ERROR != MPI_ERR_PENDING;
      if (code == MPI_ERR_IN_STATUS && has_failed) end.text = text_of(status.MPI_ERROR);
    }
    return true;
  }
  if (done == 0) return false;
  posted.free_types();
  int was_cancelled = 0;
  if (call.progress.is_cancelled) MPI_Test_cancelled(&posted.statuses.front(), &was_cancelled);
  if (was_cancelled != 0) {
    end.how = Ended::How::dropped;
    return true;
  }
  const Step& step = call.steps()[call.progress.step];
  if (step.check) end.failure = step.check(posted);
  if (!end.failure.what.empty()) end.how = Ended::How::broken;
  return true;
}

void Lane::give_up(std::vector<Ended>& ended, Ended::How how) {
  for (CallPtr& call : open_) {
    is_clean_ = false;
    keep_for_ever(call);
    num_untold_ += call->is_peer_call() ? 0 : 1;
    ended.push_back({call, this, how});
  }
  open_.clear();
}

bool Lane::has_collectives() const {
  // A callback on the driver's thread is itself part of what its collective is told.
  if (num_untold_ > 0 && !on_driver_thread()) return true;
  return std::any_of(open_.begin(), open_.end(), [](const CallPtr& call) { return !call->is_peer_call(); });
}

bool Lane::drain(std::chrono::milliseconds timeout) {
  const auto deadline = Clock::now() + timeout;
  std::unique_lock<std::mutex> turn(turns());
  while (has_collectives() && !status_->failed() && Clock::now() < deadline) {
    if (on_driver_thread()) {
      turn.unlock();
      drive();
      turn.lock();
    } else {
      Driver::instance().landed().wait_for(turn, 10ms);
    }
  }
  return !has_collectives();
}

void Lane::cancel_receives() {
  for (const CallPtr& call : open_) {
    if (call->call().record.kind != watch::Kind::recv || call->progress.is_cancelled) continue;
    call->progress.is_cancelled = true;
    for (MPI_Request& request : call->progress.posted.requests) MPI_Cancel(&request);
  }
}

bool Lane::close() {
  const auto deadline = Clock::now() + kFarewell;
  std::vector<Ended> ended;
  {
    const std::lock_guard<std::mutex> turn(turns());
    cancel_receives();
  }
  while (true) {
    bool is_over = false;
    {
      const std::lock_guard<std::mutex> turn(turns());
      is_over = !advance(ended);
      if (!is_over && Clock::now() > deadline) {
        give_up(ended, Ended::How::dropped);
        is_over = true;
      }
    }
    Driver::instance().tell(ended);
    if (is_over) break;
    std::this_thread::sleep_for(200us);
  }
  const std::lock_guard<std::mutex> turn(turns());
  // A message that nobody has received would be taken for one of the next group with the same number.
  MPI_Comm comm = comm_;
  if (is_clean_ && !has_peer_calls_) MPI_Comm_free(&comm);
  return is_clean_;
}

}  // namespace serried::mpi
