// What every rank tells every other through the store, before there is a group.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <string>
#include <string_view>
#include <vector>

namespace serried::detail {

struct ExchangeArgs {
  c10::intrusive_ptr<c10d::Store> store;
  int rank = 0;
  int world_size = 1;
  std::chrono::milliseconds timeout{};
};

/// All ranks' `value`, in rank order. Blocks until all have come; after the timeout a DistBackendError names those that
/// have not. `key` is used once per store; `where` is the call that waits.
std::vector<std::string> exchange(const ExchangeArgs& args, std::string_view where, const std::string& key,
                                  const std::string& value);

/// Whether all keys have come within `timeout`. Where they have not, nobody waits for the late at exit.
/// DistBackendError that says so where the store itself is gone.
bool wait_for_keys(const c10::intrusive_ptr<c10d::Store>& store, std::string_view where,
                   const std::vector<std::string>& keys, std::chrono::milliseconds timeout);

}  // namespace serried::detail
