// The barrier that says who does not come, in the words that PyTorch's callers look for.
#include <c10/util/StringUtil.h>

#include "serried/base/error.h"
#include "serried/comm/backends/shm/backend.h"

namespace serried::shm {
namespace {

/// "Rank 2 failed to pass monitoredBarrier in 100 ms", "Ranks 1, 2 failed ...": of one rank the first, unless all are
/// asked for.
std::string failed_text(const std::vector<int>& missing, bool all, int64_t ms) {
  const bool several = all && missing.size() > 1;
  return c10::str(several ? "Ranks " : "Rank ", several ? c10::Join(", ", missing) : std::to_string(missing.front()),
                  " failed to pass monitoredBarrier in ", ms, " ms");
}

std::string first_line(const c10::Error& error) {
  const std::string text = error.what_without_backtrace();
  return text.substr(0, text.find('\n'));
}

}  // namespace

void ShmBackend::monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) {
  constexpr const char* where = "monitored_barrier";
  const int64_t ms = timeout_or_default(options.timeout).count();
  try {
    barrier(options)->wait();
  } catch (const c10::DistBackendError& error) {
    // Every rank of the shared memory sees all that did not come, so to wait for all of them takes no longer.
    const std::vector<int> missing = driver_->engine().sync().ranks_behind();
    if (missing.empty()) throw;
    const std::string what =
        rank_ == 0 ? c10::str("Rank 0 timed out in monitoredBarrier after ", ms,
                              " ms: ", failed_text(missing, wait_all_ranks, ms))
                   : c10::str("Rank ", rank_,
                              " successfully reached monitoredBarrier, but received errors while waiting for send/recv "
                              "from rank 0: ",
                              failed_text(missing, wait_all_ranks, ms));
    raise<c10::DistBackendError>({where, what + "; " + first_line(error), watch::kMissingFix});
  }
}

}  // namespace serried::shm
