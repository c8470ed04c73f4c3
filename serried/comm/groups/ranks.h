// Ranks as threads of one process: for tests, debugging and teaching.
#pragma once

#include "serried/comm/groups/group.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>

#include <chrono>
#include <functional>
#include <mutex>
#include <string>
#include <utility>

namespace serried {

struct RunRanksOptions {
  std::string backend = "threads";
  std::chrono::milliseconds timeout = default_timeout();
};

/// Runs `fn` once per rank, each on a thread of its own, with a group of `world_size` that is also current there.
/// The first failure aborts the other ranks' collectives; when all threads have ended it is rethrown:
/// c10 errors keep their type, any other becomes a c10::Error, and what() starts with "rank 2: ".
///     run_ranks(4, [](const Group& g) { all_reduce_(torch::ones(3), g); });
void run_ranks(int world_size, const std::function<void(const Group&)>& fn, RunRanksOptions options = {});

namespace detail {
std::mutex& seeding_mutex();
}

/// Seeds torch's default generator and keeps other `seeded` calls out while `fn` runs:
/// equal weights on every rank thread.
///     auto net = seeded(0, [] { return Net(); });
template <class Fn>
auto seeded(uint64_t seed, Fn&& fn) {
  std::lock_guard<std::mutex> lock(detail::seeding_mutex());
  at::manual_seed(seed);
  return std::forward<Fn>(fn)();
}

}  // namespace serried
