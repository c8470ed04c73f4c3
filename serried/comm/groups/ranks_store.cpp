// Waits that look whether the run has failed.
#include "serried/comm/groups/ranks_store.h"

#include <c10/util/StringUtil.h>

#include "serried/base/error.h"

namespace serried::detail {

void RanksStore::wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) {
  std::unique_lock<std::mutex> lock(m_);
  const auto arrived = [&] { return checkLocked(lock, keys); };
  const auto done = [&] { return aborted_ || arrived(); };
  if (timeout == kNoTimeout) {
    cv_.wait(lock, done);
  } else {
    cv_.wait_for(lock, timeout, done);
  }
  if (arrived()) return;
  if (aborted_) {
    raise<c10::DistStoreError>({"run_ranks", "another rank failed while this one waited for " + c10::Join(", ", keys),
                                "see the first failure"});
  }
  raise<c10::DistStoreError>(
      {"run_ranks", c10::str("waited ", timeout.count(), " ms for ", c10::Join(", ", keys), ": not every rank came"),
       "make the same groups in the same order on every rank, or pass a longer {.timeout}"});
}

std::vector<uint8_t> RanksStore::get(const std::string& key) {
  wait({key}, timeout_);
  return HashStore::get(key);
}

std::vector<std::vector<uint8_t>> RanksStore::multiGet(const std::vector<std::string>& keys) {
  wait(keys, timeout_);
  return HashStore::multiGet(keys);
}

void RanksStore::abort() {
  std::lock_guard<std::mutex> lock(m_);
  aborted_ = true;
  cv_.notify_all();
}

}  // namespace serried::detail
