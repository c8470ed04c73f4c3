// The store of ranks that are threads of one process: its waits end when the run does.
#pragma once

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <chrono>
#include <string>
#include <vector>

namespace serried::detail {

/// A HashStore whose waits end when the run fails.
class RanksStore final : public c10d::HashStore {
 public:
  explicit RanksStore(std::chrono::milliseconds timeout) { timeout_ = timeout; }

  using HashStore::wait;
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) override;
  std::vector<uint8_t> get(const std::string& key) override;
  std::vector<std::vector<uint8_t>> multiGet(const std::vector<std::string>& keys) override;

  /// Every wait that runs or comes later raises a DistStoreError, unless its keys are there.
  void abort();

 private:
  bool aborted_ = false;
};

}  // namespace serried::detail
