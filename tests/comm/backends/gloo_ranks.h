// Ranks as threads that make gloo groups directly, for the tests of that backend.
#pragma once

#include "serried/comm/backends/factories.h"

#include <atomic>
#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

namespace serried::gloo_test {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::HasSubstr;
using Clock = std::chrono::steady_clock;
using Store = c10::intrusive_ptr<c10d::Store>;
using Tensors = std::vector<at::Tensor>;

inline std::string unique_name() {
  static std::atomic<int> count{0};
  return "gloo_test/" + std::to_string(count.fetch_add(1));
}

inline Group make(const Store& store, int rank, int size, const std::string& name, std::chrono::milliseconds timeout,
                  const BackendOptions& options = {}) {
  FactoryArgs args;
  args.store = store;
  args.rank = rank;
  args.world_size = size;
  args.timeout = timeout;
  args.options = options;
  args.name = name;
  return make_gloo_group(args);
}

// Runs `fn` on a thread per rank and returns what each raised, "" for nothing.
inline std::vector<std::string> on_threads(int size, const std::function<void(int)>& fn) {
  std::vector<std::string> errors(size);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        fn(rank);
      } catch (const std::exception& error) {
        errors[rank] = error.what();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  return errors;
}

using RankFn = std::function<void(int rank, const Group& group)>;

inline std::vector<std::string> on_ranks(int size, const RankFn& fn, std::chrono::milliseconds timeout = 120s,
                                         const Store& store = c10::make_intrusive<c10d::HashStore>()) {
  const std::string name = unique_name();
  return on_threads(size, [&](int rank) { fn(rank, make(store, rank, size, name, timeout)); });
}

inline void expect_quiet(const std::vector<std::string>& errors) {
  for (const auto& error : errors) EXPECT_EQ(error, "");
}

inline void all_reduce(const Group& group, at::Tensor x, c10d::ReduceOp op = c10d::ReduceOp::SUM) {
  Tensors tensors{std::move(x)};
  c10d::AllreduceOptions options;
  options.reduceOp = op;
  group->allreduce(tensors, options)->wait();
}

inline at::Tensor filled(at::IntArrayRef sizes, double value) {
  return torch::full(sizes, value, at::kFloat);
}

inline void expect_equal(const at::Tensor& got, const at::Tensor& wanted) {
  EXPECT_TRUE(torch::equal(got, wanted)) << got << "\n" << wanted;
}

}  // namespace serried::gloo_test
