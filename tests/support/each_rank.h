// Threads that are ranks by their label only: they have no group yet.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <thread>
#include <vector>

#include "serried/base/error.h"
#include "serried/comm/groups/ranks.h"

namespace serried::testing {

/// Runs `body` once for each rank, all at the same time; nothing may be thrown.
inline void each_rank(int world_size, const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world_size; ++rank) {
    threads.emplace_back([&, rank] {
      const ThreadRankLabel label({.rank = rank, .world_size = world_size});
      EXPECT_NO_THROW(body(rank));
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace serried::testing
