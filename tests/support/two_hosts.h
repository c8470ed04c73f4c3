// A store that makes rank 1 look as if it ran on another host.
#pragma once

#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

namespace serried::testing {

class TwoHosts : public c10d::HashStore {
 public:
  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    auto changed = value;
    if (key.ends_with("host/1")) changed.push_back('x');
    HashStore::set(key, changed);
  }
};

}  // namespace serried::testing
