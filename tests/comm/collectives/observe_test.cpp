// Observers of collectives: what they are told, when, and on which thread.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <mutex>
#include <vector>

#include "serried/comm/collectives/collectives.h"
#include "serried/comm/collectives/observe.h"
#include "serried/comm/groups/ranks.h"

namespace serried {
namespace {

using Seen = std::vector<std::pair<std::string, int64_t>>;

observe::Observer recorder(Seen& seen) {
  return observe::Observer([&seen](const observe::Call& call) { seen.emplace_back(call.name, call.bytes); });
}

TEST(Observe, EveryCollectiveIsToldOnceWithTheBytesOfItsInput) {
  run_ranks(2, [](const Group& group) {
    Seen seen;
    const observe::Observer observer = recorder(seen);
    const at::Tensor x = at::ones({4, 2});
    all_reduce(x, group);
    all_reduce_(x, group);
    all_gather(x, group);
    reduce_scatter(x, group);
    all_to_all(x, group);
    broadcast(x, group);
    broadcast_(x, group);
    all_gather_into(at::empty({8, 2}), x, group);
    reduce_scatter_into(at::empty({2, 2}), x, group);
    all_to_all_into(at::empty({4, 2}), x, group);
    reduce(x, group);
    gather(x, group);
    const bool sends = group->getRank() == 0;
    scatter(sends ? x.tensor_split(2) : std::vector<at::Tensor>(), group);  // the other gets half
    barrier(group);
    const Seen expected{{"all_reduce", 32},           {"all_reduce", 32}, {"all_gather", 32}, {"reduce_scatter", 32},
                        {"all_to_all", 32},           {"broadcast", 32},  {"broadcast", 32},  {"all_gather", 32},
                        {"reduce_scatter", 32},       {"all_to_all", 32}, {"reduce", 32},     {"gather", 32},
                        {"scatter", sends ? 32 : 16}, {"barrier", 0}};
    EXPECT_EQ(seen, expected);
  });
}

TEST(Observe, PointToPointIsToldOnItsOwnSide) {
  run_ranks(2, [](const Group& group) {
    Seen seen;
    const observe::Observer observer = recorder(seen);
    const at::Tensor x = at::ones({3});
    if (group->getRank() == 0) send(x, group, {.peer = 1});
    if (group->getRank() == 1) recv(x, group, {.peer = 0});
    EXPECT_EQ(seen, (Seen{{group->getRank() == 0 ? "send" : "recv", 12}}));
  });
}

TEST(Observe, BackwardIsTold) {
  run_ranks(2, [](const Group& group) {
    const at::Tensor x = torch::ones({4}, at::TensorOptions().requires_grad(true));
    const at::Tensor y = all_gather(x, group);
    Seen seen;
    const observe::Observer observer = recorder(seen);
    y.sum().backward();
    EXPECT_EQ(seen, (Seen{{"reduce_scatter", 32}}));
    const at::Tensor sum = reduce(x, group);
    const at::Tensor part = gather(x, group)[0];
    const bool sends = group->getRank() == 0;
    const at::Tensor mine = scatter(sends ? x.tensor_split(2) : std::vector<at::Tensor>(), group);
    seen.clear();
    (sum + part).sum().backward();
    mine.sum().backward();
    std::sort(seen.begin(), seen.begin() + 2);  // autograd orders the two
    EXPECT_EQ(seen, (Seen{{"broadcast", 16}, {"scatter", sends ? 32 : 16}, {"gather", 8}}));
  });
}

TEST(Observe, ObserversNestAndMayEndInAnyOrder) {
  run_ranks(2, [](const Group& group) {
    Seen outer, inner;
    auto first =
        std::make_unique<observe::Observer>([&](const observe::Call& c) { outer.emplace_back(c.name, c.bytes); });
    auto second =
        std::make_unique<observe::Observer>([&](const observe::Call& c) { inner.emplace_back(c.name, c.bytes); });
    barrier(group);
    first.reset();
    barrier(group);
    second.reset();
    barrier(group);
    EXPECT_EQ(outer.size(), 1u);
    EXPECT_EQ(inner.size(), 2u);
  });
}

TEST(Observe, OneRankAloneCommunicatesNothing) {
  run_ranks(1, [](const Group& group) {
    Seen seen;
    const observe::Observer observer = recorder(seen);
    all_reduce(at::ones({2}), group);
    EXPECT_TRUE(seen.empty());
  });
}

TEST(Observe, OtherThreadsAreNotTold) {
  std::mutex mutex;
  int told = 0;
  run_ranks(2, [&](const Group& group) {
    std::optional<observe::Observer> observer;
    if (group->getRank() == 0) {
      observer.emplace([&](const observe::Call&) {
        std::lock_guard<std::mutex> lock(mutex);
        ++told;
      });
    }
    all_reduce(at::ones({2}), group);
  });
  EXPECT_EQ(told, 1);
}

}  // namespace
}  // namespace serried
