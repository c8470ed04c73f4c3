// run_ranks: threads as ranks, and what becomes of their failures.
#include "serried/comm/groups/ranks.h"

#include <ATen/Parallel.h>
#include <c10/util/thread_name.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <atomic>
#include <latch>
#include <numeric>
#include <set>
#include <thread>

#include "serried/base/error.h"
#include "serried/comm/collectives/collectives.h"
#include "tests/support/errors.h"
#include "tests/support/on_ranks.h"

namespace serried {
namespace {

using ::testing::AllOf;
using testing::error_text;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using Clock = std::chrono::steady_clock;

class RunRanks : public testing::OnRanks {
 protected:
  void run(const std::function<void(const Group&)>& fn) {
    run_ranks(world_size(), fn, {.backend = GetParam().backend, .timeout = std::chrono::seconds(120)});
  }
};

INSTANTIATE_TEST_SUITE_P(On, RunRanks, ::testing::ValuesIn(testing::settings({1, 3})), testing::name_of);

TEST_P(RunRanks, GivesEachThreadItsRankAndGroup) {
  std::mutex mutex;
  std::set<int> ranks;
  std::set<std::thread::id> threads;
  run([&](const Group& g) {
    EXPECT_EQ(g->getSize(), world_size());
    EXPECT_EQ(current_process_group(), g);
    EXPECT_EQ(rank_label().rank, g->getRank());
    EXPECT_EQ(rank_label().world_size, world_size());
    std::lock_guard<std::mutex> lock(mutex);
    ranks.insert(g->getRank());
    threads.insert(std::this_thread::get_id());
  });
  EXPECT_EQ(int(ranks.size()), world_size());
  EXPECT_EQ(int(threads.size()), world_size());
  EXPECT_EQ(*ranks.rbegin(), world_size() - 1);
  EXPECT_EQ(current_process_group(), nullptr);
  EXPECT_EQ(rank_label().rank, -1);
}

TEST_P(RunRanks, NamesItsThreadsAndNotTheCallers) {
  const std::string callers = c10::getThreadName();
  run([&](const Group& g) { EXPECT_EQ(c10::getThreadName(), c10::str("rank ", g->getRank())); });
  EXPECT_EQ(c10::getThreadName(), callers);
}

TEST_P(RunRanks, KeepsTheCallersStateAndThreadCount) {
  const int before = at::get_num_threads();
  torch::NoGradGuard no_grad;
  run([&](const Group&) {
    EXPECT_FALSE(at::GradMode::is_enabled());
    EXPECT_EQ(at::get_num_threads(), 1);
  });
  EXPECT_EQ(at::get_num_threads(), before);
  std::thread([&] { EXPECT_EQ(at::get_num_threads(), before); }).join();
}

TEST_P(RunRanks, HoldsTheCurrentGroupInsideBackward) {
  run([&](const Group& g) {
    const at::Tensor x = at::ones({2}).requires_grad_();
    const at::Tensor y = x * 2;
    int seen = -1;
    y.register_hook([&](const at::Tensor& grad) {
      seen = current_process_group() == g ? g->getRank() : -2;
      return all_reduce(grad, current_process_group());
    });
    y.sum().backward();
    EXPECT_EQ(seen, g->getRank());
    EXPECT_TRUE(x.grad().eq(2 * g->getSize()).all().item<bool>());
  });
}

// One rank fails while the others wait for it in a collective.
template <class Throw>
void fail_on_last_rank(const Group& g, Throw throw_it) {
  if (g->getRank() == g->getSize() - 1) throw_it();
  at::Tensor x = at::ones({1000});
  all_reduce_(x, g);
}

template <class Expected, class Throw>
std::string failure_of(int world_size, const std::string& backend, Throw throw_it) {
  return error_text<Expected>([&] {
    run_ranks(world_size, [&](const Group& g) { fail_on_last_rank(g, throw_it); },
              {.backend = backend, .timeout = std::chrono::seconds(120)});
  });
}

template <class Exception>
void expect_type_kept(const testing::Setting& setting) {
  const std::string rank = "rank " + std::to_string(setting.world_size - 1) + ": ";
  EXPECT_EQ((failure_of<Exception>(setting.world_size, setting.backend, [] { throw Exception("on purpose"); })),
            rank + "on purpose");
}

TEST_P(RunRanks, RethrowsTheRootCauseWithItsTypeAndRank) {
  const auto start = Clock::now();
  expect_type_kept<c10::ValueError>(GetParam());
  expect_type_kept<c10::TypeError>(GetParam());
  expect_type_kept<c10::IndexError>(GetParam());
  expect_type_kept<c10::NotImplementedError>(GetParam());
  expect_type_kept<c10::LinAlgError>(GetParam());
  expect_type_kept<c10::OutOfMemoryError>(GetParam());
  expect_type_kept<c10::DistBackendError>(GetParam());
  expect_type_kept<c10::DistStoreError>(GetParam());
  expect_type_kept<c10::DistNetworkError>(GetParam());
  expect_type_kept<c10::Error>(GetParam());
  // All long before the timeout of 120 s: the others were aborted.
  EXPECT_LT(Clock::now() - start, std::chrono::seconds(60));
}

TEST_P(RunRanks, TurnsOtherExceptionsIntoErrors) {
  const std::string rank = "rank " + std::to_string(world_size() - 1) + ": ";
  const auto text = [&](auto throw_it) { return failure_of<c10::Error>(world_size(), GetParam().backend, throw_it); };
  EXPECT_EQ(text([] { throw std::runtime_error("on purpose"); }), rank + "on purpose");
  EXPECT_EQ(text([] { throw std::bad_alloc(); }), rank + "std::bad_alloc");
  EXPECT_EQ(text([] { throw 7; }), rank + "an exception that is not a std::exception");
  EXPECT_THAT(text([] { TORCH_CHECK(false, "on purpose"); }), StartsWith(rank + "on purpose"));
}

TEST_P(RunRanks, AbortsGroupsThatRanksMade) {
  const auto start = Clock::now();
  const auto run_it = [&] {
    run([&](const Group& g) {
      std::vector<int> everyone(g->getSize());
      std::iota(everyone.begin(), everyone.end(), 0);
      const Group inner = split_group(g, {everyone});
      barrier(inner);
      if (g->getRank() == 0) throw c10::IndexError("on purpose");
      at::Tensor x = at::ones({100});
      all_reduce_(x, inner);
    });
  };
  EXPECT_EQ(error_text<c10::IndexError>(run_it), "rank 0: on purpose");
  EXPECT_LT(Clock::now() - start, std::chrono::seconds(60));
}

// Rank 0 fails, but its group does not go with it: only the run can wake who waits in that group.
void expect_abort_of(const testing::Setting& setting, const std::function<Group(const Group&)>& make) {
  const auto start = Clock::now();
  std::vector<Group> kept(setting.world_size);
  const auto run_it = [&] {
    run_ranks(setting.world_size,
              [&](const Group& g) {
                kept[g->getRank()] = make(g);
                barrier(kept[g->getRank()]);
                if (g->getRank() == 0) throw c10::IndexError("on purpose");
                all_reduce_(at::ones({100}), kept[g->getRank()]);
              },
              {.backend = setting.backend, .timeout = std::chrono::seconds(120)});
  };
  EXPECT_EQ(error_text<c10::IndexError>(run_it), "rank 0: on purpose");
  EXPECT_LT(Clock::now() - start, std::chrono::seconds(60));
}

TEST_P(RunRanks, AbortsNewGroupsThatOutliveTheirRank) {
  expect_abort_of(GetParam(), [&](const Group& g) { return testing::sibling(g, GetParam().backend); });
}

TEST_P(RunRanks, AbortsSplitGroupsThatOutliveTheirRank) {
  expect_abort_of(GetParam(), [](const Group& g) {
    std::vector<int> everyone(g->getSize());
    std::iota(everyone.begin(), everyone.end(), 0);
    return split_group(g, {everyone});
  });
}

TEST_P(RunRanks, AbortsRanksThatWaitToMakeAGroup) {
  const auto start = Clock::now();
  const auto run_it = [&] {
    run([&](const Group& g) {
      if (g->getRank() == 0) throw c10::TypeError("on purpose");
      new_group(GetParam().backend, {.timeout = std::chrono::seconds(120),
                                     .store = g->getStore(),
                                     .rank = g->getRank(),
                                     .world_size = g->getSize(),
                                     .backend_options = {}});
    });
  };
  EXPECT_EQ(error_text<c10::TypeError>(run_it), "rank 0: on purpose");
  EXPECT_LT(Clock::now() - start, std::chrono::seconds(60));
}

TEST_P(RunRanks, CanRunAgainAfterAFailure) {
  for (int i = 0; i < 3; ++i) {
    EXPECT_THROW(run([](const Group&) { throw c10::ValueError("on purpose"); }), c10::ValueError);
    run([](const Group& g) {
      at::Tensor x = at::ones({3});
      all_reduce_(x, g);
      EXPECT_TRUE(x.eq(g->getSize()).all().item<bool>());
    });
  }
}

TEST_P(RunRanks, Nests) {
  std::atomic<int> total = 0;
  run([&](const Group& outer) {
    run_ranks(2, [&](const Group& inner) {
      EXPECT_EQ(current_process_group(), inner);
      all_reduce(at::ones({2}), inner);
      total += 1;
    });
    EXPECT_EQ(current_process_group(), outer);
    all_reduce(at::ones({2}), outer);
  });
  EXPECT_EQ(total, 2 * world_size());
}

TEST(RunRanksErrors, AWorldOfNoRanksIsRefused) {
  EXPECT_EQ(error_text<c10::ValueError>([] { run_ranks(0, [](const Group&) {}); }),
            "[run_ranks] world_size is 0\n  fix: pass 1 or more");
  EXPECT_THROW(run_ranks(-3, [](const Group&) {}), c10::ValueError);
  EXPECT_EQ(error_text<c10::ValueError>([] { run_ranks(2, nullptr); }),
            "[run_ranks] the function is empty\n  fix: pass what each rank runs");
}

TEST(RunRanksErrors, AnUnknownBackendIsNamed) {
  EXPECT_THAT(error_text<c10::ValueError>([] { run_ranks(2, [](const Group&) {}, {.backend = "nope"}); }),
              AllOf(StartsWith("rank "), HasSubstr("nope")));
}

// Rank 2 is there, but comes to nothing before the others have given up on it.
TEST(RunRanksErrors, ATimeoutIsABackendErrorThatNamesWhoIsMissing) {
  const auto start = Clock::now();
  std::latch given_up(2);
  const auto call = [&](const Group& g) {
    if (g->getRank() == 2) return given_up.wait();
    try {
      all_reduce_(at::ones({4}), g);
    } catch (...) {
      given_up.count_down();
      throw;
    }
    given_up.count_down();
  };
  const std::string text =
      error_text<c10::DistBackendError>([&] { run_ranks(3, call, {.timeout = std::chrono::milliseconds(300)}); });
  EXPECT_THAT(text, AllOf(StartsWith("rank "), HasSubstr("timed out after "), HasSubstr("rank 2")));
  EXPECT_GE(Clock::now() - start, std::chrono::milliseconds(300));
  EXPECT_LT(Clock::now() - start, std::chrono::seconds(60));
}

TEST(Seeded, GivesEqualWeightsOnEveryRank) {
  run_ranks(4, [](const Group& g) {
    const at::Tensor weight = seeded(7, [] { return torch::nn::Linear(5, 3)->weight.detach().clone(); });
    EXPECT_TRUE(weight.equal(broadcast(weight, g)));
  });
}

}  // namespace
}  // namespace serried
