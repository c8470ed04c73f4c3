// A store with a stranger at it, who changes every value under some keys as soon as it is written.
#pragma once

#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

namespace serried::testing {

class MeddlingStore : public c10d::HashStore {
 public:
  /// Changes what is written under keys that hold `part`; `forged` is what stands there then.
  MeddlingStore(std::string part, std::string forged) : part_(std::move(part)), forged_(std::move(forged)) {}

  using HashStore::compareSet;
  using HashStore::set;

  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    HashStore::set(key, meddled(key, value));
  }

  std::vector<uint8_t> compareSet(const std::string& key, const std::vector<uint8_t>& expected,
                                  const std::vector<uint8_t>& desired) override {
    if (key.find(part_) == std::string::npos) return HashStore::compareSet(key, expected, desired);
    // The forged value goes in at once: nobody may read the true one for a moment.
    const std::lock_guard lock(mutex_);
    const bool absent = !check({key});
    const std::vector<uint8_t> result = HashStore::compareSet(key, expected, meddled(key, desired));
    return absent && expected.empty() ? desired : result;
  }

 private:
  std::vector<uint8_t> meddled(const std::string& key, const std::vector<uint8_t>& value) const {
    if (key.find(part_) == std::string::npos) return value;
    return {forged_.begin(), forged_.end()};
  }

  const std::string part_;
  const std::string forged_;
  std::mutex mutex_;
};

}  // namespace serried::testing
