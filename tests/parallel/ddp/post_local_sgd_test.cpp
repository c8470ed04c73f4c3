// Post-local SGD's hook: the whole group first, few ranks later.
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "serried/base/error.h"
#include "serried/parallel/ddp/hooks/hooks.h"
#include "tests/parallel/ddp/buckets.h"
#include "tests/support/each_rank.h"
#include "tests/support/errors.h"
#include "tests/support/on_ranks.h"
#include "tests/support/two_hosts.h"

namespace serried {
namespace {

using testing::error_text;
using testing::expect_close;
using testing::expect_equal;
using testing::gradient_of;
using testing::make_bucket;
using testing::mean_gradient;
using testing::run_hook;
using testing::Shapes;
using testing::wait_for;

class PostLocalSGDOnRanks : public testing::OnRanks {};

INSTANTIATE_TEST_SUITE_P(Backends, PostLocalSGDOnRanks, ::testing::ValuesIn(testing::settings({2, 4})),
                         testing::name_of);

at::Tensor mean_over(const std::vector<int>& ranks, int64_t iteration) {
  at::Tensor sum = at::zeros({7});
  for (const int rank : ranks) sum += gradient_of(rank, iteration, {7});
  return sum / double(ranks.size());
}

TEST_P(PostLocalSGDOnRanks, AveragesInTheSubgroupFromItsStartOn) {
  on_ranks([](const Group& group) {
    const int rank = group->getRank();
    const int half = group->getSize() / 2;
    std::vector<std::vector<int>> parts(half);
    for (int r = 0; r < group->getSize(); ++r) parts[r % half].push_back(r);
    const CommHook hook = hooks::post_local_sgd({.subgroup = split_group(group, parts), .start_iter = 2});
    for (int64_t iteration = 0; iteration < 5; ++iteration) {
      const at::Tensor result = run_hook(hook, group, gradient_of(rank, iteration, {7}));
      const bool local = iteration >= 2;
      expect_close(result,
                   local ? mean_over(parts[rank % half], iteration) : mean_gradient(group->getSize(), iteration, {7}));
    }
  });
}

TEST(PostLocalSGD, CountsIterationsNotBuckets) {
  run_ranks(2, [](const Group& group) {
    const CommHook hook = hooks::post_local_sgd({.start_iter = 2, .post_local_gradient_allreduce = false});
    const Shapes shapes{{7}};
    for (int64_t iteration = 0; iteration < 4; ++iteration) {
      for (size_t b = 0; b < 3; ++b) {
        const at::Tensor mine = gradient_of(group->getRank(), iteration, {7});
        c10d::GradBucket bucket = make_bucket(mine.clone(), shapes, {.index = b, .count = 3});
        const at::Tensor result = wait_for(hook(group, bucket));
        expect_close(result, iteration < 2 ? mean_gradient(2, iteration, {7}) : mine);
      }
    }
  });
}

TEST(PostLocalSGD, WithoutASubgroupTheRanksOfTheHostAreOne) {
  run_ranks(3, [](const Group& group) {
    const CommHook hook = hooks::post_local_sgd({.start_iter = 0});
    expect_close(run_hook(hook, group, gradient_of(group->getRank(), 0, {7})), mean_gradient(3, 0, {7}));
  });
  const auto store = c10::make_intrusive<testing::TwoHosts>();
  testing::each_rank(3, [&](int rank) {
    const Group group = new_group("threads", {.store = store, .rank = rank, .world_size = 3});
    const CommHook hook = hooks::post_local_sgd({.start_iter = 1});
    for (int64_t iteration = 0; iteration < 3; ++iteration) {
      const at::Tensor result = run_hook(hook, group, gradient_of(rank, iteration, {7}));
      const std::vector<int> peers = rank == 1 ? std::vector{1} : std::vector{0, 2};
      expect_close(result, iteration == 0 ? mean_gradient(3, 0, {7}) : mean_over(peers, iteration));
    }
  });
}

TEST(PostLocalSGD, RefusesAStartBeforeTheBeginning) {
  EXPECT_EQ(error_text<c10::ValueError>([] { hooks::post_local_sgd({.start_iter = -1}); }),
            "[post_local_sgd] start_iter is -1\n  fix: pass the number of iterations before local SGD: 0 or more");
}

}  // namespace
}  // namespace serried
