// Collectives that c10d has started: however a step learns that one has ended, its replays are sure of it too.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <thread>

#include "serried/comm/groups/ranks.h"
#include "serried/graph/capture.h"
#include "tests/support/on_ranks.h"

namespace serried {
namespace {

using testing::OnRanks;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

class CapturedWorks : public OnRanks {};
INSTANTIATE_TEST_SUITE_P(Backends, CapturedWorks, ::testing::ValuesIn(testing::settings({1, 2, 3})), testing::name_of);

/// What the ranks' x sum up to; large enough to be on its way for a while.
at::Tensor x_of(const Group& group, int call) {
  return torch::full({100'000}, double(call + group->getRank()));
}
at::Tensor sum_of(const Group& group, int call) {
  const int size = group->getSize();
  return torch::full({100'000}, double(size * call + size * (size - 1) / 2));
}

TEST_P(CapturedWorks, PollingUntilItIsCompletedIsAWait) {
  on_ranks([](const Group& group) {
    auto step = capture([&](const at::Tensor& x) {
      std::vector<at::Tensor> tensors = {x * 1};
      const WorkPtr work = group->allreduce(tensors);
      while (!work->isCompleted()) std::this_thread::yield();
      return tensors[0] + 1;
    });
    for (int i = 0; i < 6; ++i) EXPECT_TRUE(at::equal(step(x_of(group, i)), sum_of(group, i) + 1)) << "call " << i;
    EXPECT_EQ(step.replays(), 3);
  });
}

TEST_P(CapturedWorks, OneThatIsWaitedForOutsideEndsWithTheReplay) {
  on_ranks([](const Group& group) {
    WorkPtr work;
    auto step = capture(
        [&](const at::Tensor& x) {
          std::vector<at::Tensor> tensors = {x * 1};
          work = group->allreduce(tensors);
          return tensors[0];
        },
        {.passes = {}});
    for (int i = 0; i < 6; ++i) {
      const at::Tensor y = step(x_of(group, i));
      work->wait();
      EXPECT_TRUE(at::equal(y, sum_of(group, i))) << "call " << i;
    }
    EXPECT_EQ(step.replays(), 3);
    EXPECT_EQ(step.graph().nodes().back().short_name(), "wait") << step.graph().to_string();
  });
}

TEST_P(CapturedWorks, WhatABackendDoesWhileItIsWaitedForIsNotRecorded) {
  on_ranks([](const Group& group) {
    const int64_t size = group->getSize();
    const auto eager = [&](const at::Tensor& x) {
      std::vector<at::Tensor> sums = {x.clone(), x * 2};
      group->allreduce_coalesced(sums)->wait();
      std::vector<at::Tensor> wholes = {torch::empty({6 * size, 5}), torch::empty({6 * size, 5})};
      group->allgather_into_tensor_coalesced(wholes, sums)->wait();
      return std::vector<at::Tensor>{sums[0], sums[1], wholes[0], wholes[1]};
    };
    auto step = capture(eager, {.passes = {}});
    for (int i = 0; i < 6; ++i) {
      const at::Tensor x = testing::sample({6, 5}, group->getRank(), at::kFloat, i);
      const std::vector<at::Tensor> expected = eager(x), got = step(x);
      for (size_t k = 0; k < expected.size(); ++k) EXPECT_TRUE(at::equal(got[k], expected[k])) << "result " << k;
    }
    EXPECT_EQ(step.replays(), 3);
    EXPECT_EQ(step.graph().nodes().size(), 8u) << step.graph().to_string();
  });
}

TEST_P(CapturedWorks, ABarrierOfC10dReadsNoData) {
  on_ranks([](const Group& group) {
    auto step = capture([&](const at::Tensor& x) {
      group->barrier()->wait();
      return x + 1;
    });
    for (int i = 0; i < 6; ++i) {
      // Leaves other numbers in the memory that the next small tensor gets.
      for (int k = 0; k < 4; ++k) torch::full({1}, double(i * 10 + k));
      EXPECT_TRUE(at::equal(step(torch::full({3}, double(i))), torch::full({3}, i + 1.0)));
    }
    EXPECT_EQ(step.replays(), 3);
    EXPECT_EQ(step.graph().count("barrier"), 1) << step.graph().to_string();
  });
}

}  // namespace
}  // namespace serried
