// Ranks as threads of one process.
#include "serried/comm/groups/ranks.h"

#include <ATen/Parallel.h>
#include <ATen/ThreadLocalState.h>
#include <c10/util/thread_name.h>
#include <dlfcn.h>

#include <optional>
#include <string_view>
#include <thread>

#include "serried/base/error.h"
#include "serried/comm/groups/communication_error.h"
#include "serried/comm/groups/live_groups.h"
#include "serried/comm/groups/ranks_store.h"

namespace serried {
namespace {

using Clock = std::chrono::steady_clock;

// A rank whose exception unwinds drops its groups before it can report, and a peer that sees them close may report
// first. So a failure of another kind this soon after one of communication is taken for its cause.
constexpr std::chrono::milliseconds kUnwindTime{200};

// Each rank is one thread of a machine that it shares. at::set_num_threads would change the whole process;
// the runtimes' own calls change this thread alone.
void use_one_thread() {
  at::internal::lazy_init_num_threads();
  static const auto set_openmp = reinterpret_cast<void (*)(int)>(dlsym(RTLD_DEFAULT, "omp_set_num_threads"));
  static const auto set_mkl = reinterpret_cast<int (*)(int)>(dlsym(RTLD_DEFAULT, "MKL_Set_Num_Threads_Local"));
  if (set_openmp) set_openmp(1);
  if (set_mkl) set_mkl(1);
}

std::string prefixed(int rank, const std::string& text) {
  return c10::str("rank ", rank, ": ", text);
}

template <class Exception>
void rethrow_if(const c10::Error& error, int rank) {
  if (dynamic_cast<const Exception*>(&error) == nullptr) return;
  throw Exception(prefixed(rank, error.what_without_backtrace()), error.backtrace());
}

// Types that derive from others of the list come first.
template <class... Exceptions>
[[noreturn]] void rethrow_same_type(const c10::Error& error, int rank) {
  (rethrow_if<Exceptions>(error, rank), ...);
  throw c10::Error(prefixed(rank, error.what_without_backtrace()), error.backtrace());
}

/// Throws `error` again with "rank 2: " before its text. c10's types are kept, any other becomes a c10::Error.
[[noreturn]] void rethrow_with_rank(const std::exception_ptr& error, int rank) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::Error& e) {
    rethrow_same_type<c10::IndexError, c10::ValueError, c10::TypeError, c10::NotImplementedError, c10::BufferError,
                      c10::EnforceFiniteError, c10::LinAlgError, c10::OutOfMemoryError, c10::SyntaxError,
                      c10::DistQueueEmptyError, c10::DistStoreError, c10::DistBackendError, c10::DistNetworkError,
                      c10::DistError>(e, rank);
  } catch (const std::exception& e) {
    throw c10::Error(prefixed(rank, e.what()));
  } catch (...) {
    throw c10::Error(prefixed(rank, "an exception that is not a std::exception"));
  }
}

struct RankFailure {
  int rank;
  std::exception_ptr error;
  Clock::time_point time;
};

// One call of run_ranks: what its threads share.
class Run {
 public:
  Run(int world_size, const std::function<void(const Group&)>& fn, const RunRanksOptions& options)
      : world_size_(world_size),
        fn_(fn),
        options_(options),
        groups_(std::make_shared<detail::LiveGroups>(detail::live_groups_of_thread())),
        store_(c10::make_intrusive<detail::RanksStore>(options.timeout)) {}

  void run() {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < world_size_; ++rank) threads.emplace_back([this, rank] { guarded_rank(rank); });
    for (std::thread& thread : threads) thread.join();
    if (const std::optional<RankFailure> failure = root_failure()) rethrow_with_rank(failure->error, failure->rank);
  }

 private:
  void guarded_rank(int rank) {
    c10::setThreadName(c10::str("rank ", rank));  // what debuggers and top show
    try {
      run_rank(rank);
    } catch (...) {
      fail(rank, std::current_exception());
    }
  }

  void run_rank(int rank) {
    const at::ThreadLocalStateGuard state(caller_state_);
    const ThreadRankLabel label({.rank = rank, .world_size = world_size_});
    const detail::LiveGroupsGuard live(groups_);
    use_one_thread();
    const Group group = new_group(
        options_.backend,
        {.timeout = options_.timeout, .store = store_, .rank = rank, .world_size = world_size_, .backend_options = {}});
    const ProcessGroupGuard current(group);
    try {
      fn_(group);
    } catch (...) {
      // Reported while this rank's group still stands: its end would look like a failure to the peers.
      fail(rank, std::current_exception());
    }
  }

  void fail(int rank, std::exception_ptr error) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      failures_.push_back({rank, std::move(error), Clock::now()});
      if (failures_.size() > 1) return;
    }
    store_->abort();
    groups_->abort();
  }

  // The earliest failure that is not the consequence of another.
  std::optional<RankFailure> root_failure() const {
    if (failures_.empty()) return std::nullopt;
    const RankFailure& first = failures_.front();
    if (!detail::is_communication_error(first.error)) return first;
    for (const RankFailure& later : failures_) {
      if (later.time - first.time > kUnwindTime) break;
      if (!detail::is_communication_error(later.error)) return later;
    }
    return first;
  }

  const int world_size_;
  const std::function<void(const Group&)>& fn_;
  const RunRanksOptions& options_;
  const at::ThreadLocalState caller_state_;
  const std::shared_ptr<detail::LiveGroups> groups_;
  const c10::intrusive_ptr<detail::RanksStore> store_;
  std::mutex mutex_;
  std::vector<RankFailure> failures_;  // in order of time
};

}  // namespace

namespace detail {

std::mutex& seeding_mutex() {
  static std::mutex mutex;
  return mutex;
}

}  // namespace detail

void run_ranks(int world_size, const std::function<void(const Group&)>& fn, RunRanksOptions options) {
  if (world_size < 1) {
    raise<c10::ValueError>({"run_ranks", c10::str("world_size is ", world_size), "pass 1 or more"});
  }
  if (!fn) raise<c10::ValueError>({"run_ranks", "the function is empty", "pass what each rank runs"});
  Run(world_size, fn, options).run();
}

}  // namespace serried
