// A step of DistributedDataParallel in the trace: its phases, and each bucket with what it moves.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <numeric>
#include <set>

#include "serried/comm/groups/ranks.h"
#include "serried/graph/capture.h"
#include "serried/parallel/ddp/ddp.h"
#include "serried/parallel/ddp/hooks/hooks.h"
#include "serried/parallel/ddp/optimizer_in_backward.h"
#include "serried/parallel/zero.h"
#include "tests/support/traced.h"

namespace serried {
namespace {

using testing::begin_of;
using testing::end_of;
using testing::json;
using testing::named;
using testing::slices_of;

using TracedNet = torch::nn::Sequential;

// Two layers with buffers between them; buckets hold one layer or less.
TracedNet make_traced_net() {
  return seeded(3,
                [] { return TracedNet(torch::nn::Linear(5, 7), torch::nn::BatchNorm1d(7), torch::nn::Linear(7, 3)); });
}
constexpr int64_t kTracedParameters = 6;
constexpr int64_t kTracedElements = 5 * 7 + 7 + 7 + 7 + 7 * 3 + 3;

void traced_step(DistributedDataParallel<TracedNet>& ddp) {
  ddp(torch::ones({4, 5})).sum().backward();
}

// The slices of two steps, on two ranks; the second has the buckets that stay.
std::vector<json> trace_two_steps(DDPOptions options, const std::string& backend = "threads") {
  return slices_of([&] {
    run_ranks(2,
              [&](const Group& g) {
                DDPOptions mine = options;
                mine.process_group = g;
                DistributedDataParallel<TracedNet> ddp(make_traced_net(), mine);
                for (int i = 0; i < 2; ++i) traced_step(ddp);
              },
              {.backend = backend});
  });
}

int64_t sum_of_notes(const std::vector<json>& slices, const char* note) {
  return std::accumulate(slices.begin(), slices.end(), int64_t{0}, [&](int64_t sum, const json& slice) {
    return sum + slice.at("args").at(note).get<int64_t>();
  });
}

class TracedDdp : public ::testing::TestWithParam<const char*> {};

TEST_P(TracedDdp, EachBucketSaysWhatItMoves) {
  const auto slices = trace_two_steps({.bucket_cap_mb = 0.0001}, GetParam());
  for (const int rank : {0, 1}) {
    const auto buckets = named(slices, rank, "all_reduce: DDP bucket ");
    ASSERT_GE(buckets.size(), 3U);  // more than one in one of the steps
    EXPECT_EQ(sum_of_notes(buckets, "bytes"), 2 * kTracedElements * 4);
    EXPECT_EQ(sum_of_notes(buckets, "parameters"), 2 * kTracedParameters);
    for (const json& bucket : buckets) {
      EXPECT_EQ(bucket.at("cat"), "communication");
      EXPECT_EQ(bucket.at("name"), "all_reduce: DDP bucket " + bucket.at("args").at("bucket").dump());
      EXPECT_EQ(bucket.at("args").at("dtype"), "f32");
      EXPECT_EQ(bucket.at("args").at("group_size"), 2);
    }
    EXPECT_EQ(buckets[0].at("args").at("bucket"), 0);
  }
  const auto first = named(slices, 0, "all_reduce: DDP bucket "), second = named(slices, 1, "all_reduce: DDP bucket ");
  ASSERT_EQ(first.size(), second.size());
  for (size_t i = 0; i < first.size(); ++i) {
    EXPECT_EQ(first[i].at("args").at("sequence"), second[i].at("args").at("sequence"));
  }
}

TEST_P(TracedDdp, BucketsLeaveWhileBackwardRunsAndAreWaitedForAfterIt) {
  const auto slices = trace_two_steps({.bucket_cap_mb = 0.0001}, GetParam());
  const auto backwards = named(slices, 0, "backward"), buckets = named(slices, 0, "all_reduce: DDP bucket "),
             waits = named(slices, 0, "wait for all_reduce: DDP bucket ");
  ASSERT_EQ(backwards.size(), 2U);
  ASSERT_EQ(waits.size(), buckets.size());
  for (size_t i = 0; i < buckets.size(); ++i) {
    const json& backward = backwards[begin_of(buckets[i]) < begin_of(backwards[1]) ? 0 : 1];
    EXPECT_EQ(backward.at("cat"), "backward");
    EXPECT_GE(begin_of(buckets[i]), begin_of(backward));
    EXPECT_LE(begin_of(buckets[i]), end_of(backward));
    EXPECT_NE(buckets[i].at("tid"), backward.at("tid"));
    EXPECT_GE(begin_of(waits[i]) + 1e-3, end_of(backward));
    EXPECT_EQ(waits[i].at("tid"), backward.at("tid"));
    EXPECT_EQ(waits[i].at("cat"), "wait");
    EXPECT_EQ(waits[i].at("args").at("sequence"), buckets[i].at("args").at("sequence"));
  }
}

TEST_P(TracedDdp, ForwardHoldsTheBroadcastOfBuffers) {
  const auto slices = trace_two_steps({}, GetParam());
  const auto forwards = named(slices, 1, "forward"), calls = named(slices, 1, "broadcast buffers"),
             sent = named(slices, 1, "broadcast: DDP's buffers");
  ASSERT_EQ(forwards.size(), 2U);
  ASSERT_EQ(calls.size(), 2U);
  ASSERT_FALSE(sent.empty());
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(forwards[i].at("cat"), "forward");
    EXPECT_EQ(calls[i].at("tid"), forwards[i].at("tid"));
    EXPECT_GE(begin_of(calls[i]), begin_of(forwards[i]));
    EXPECT_LE(end_of(calls[i]), end_of(forwards[i]) + 1e-3);
  }
  // Mean and variance of 7 channels, and how many batches there were; in both steps.
  EXPECT_EQ(sum_of_notes(sent, "bytes"), 2 * (2 * 7 * 4 + 8));
}

INSTANTIATE_TEST_SUITE_P(, TracedDdp, ::testing::Values("threads", "gloo"),
                         [](const auto& info) { return std::string(info.param); });

TEST(TracedDdpStep, NothingIsCopiedWhereGradientsAreTheBucket) {
  const auto slices = trace_two_steps({.gradient_as_bucket_view = true});
  ASSERT_EQ(named(slices, 0, "backward").size(), 2U);
  EXPECT_TRUE(named(slices, 0, "copy out of bucket").empty());
}

TEST(TracedDdpStep, CopiesIntoBucketsAndOutOfThemSayTheirSize) {
  const auto slices = trace_two_steps({.gradient_as_bucket_view = false});
  for (const char* name : {"copy into bucket", "copy out of bucket"}) {
    const auto copies = named(slices, 0, name);
    EXPECT_EQ(int64_t(copies.size()), 2 * kTracedParameters) << name;
    EXPECT_EQ(sum_of_notes(copies, "bytes"), 2 * kTracedElements * 4) << name;
    EXPECT_EQ(copies.at(0).at("cat"), "copy");
  }
}

TEST(TracedDdpStep, BackwardWithoutSynchronisationIsThereToo) {
  const auto slices = slices_of([] {
    run_ranks(2, [](const Group& g) {
      DistributedDataParallel<TracedNet> ddp(make_traced_net(), {.process_group = g});
      const auto alone = ddp.no_sync();
      traced_step(ddp);
      traced_step(ddp);
    });
  });
  EXPECT_EQ(named(slices, 0, "backward (no_sync)").size(), 2U);
  EXPECT_EQ(named(slices, 0, "backward").size(), 2U);
  EXPECT_TRUE(named(slices, 0, "all_reduce: DDP bucket").empty());
}

TEST(TracedDdpStep, WaitingForAHookNamesIt) {
  const auto slices = slices_of([] {
    run_ranks(2, [](const Group& g) {
      DistributedDataParallel<TracedNet> ddp(make_traced_net(), {.process_group = g});
      ddp.register_comm_hook(hooks::allreduce());
      traced_step(ddp);
    });
  });
  const auto waits = named(slices, 0, "wait for hook"), buckets = named(slices, 0, "all_reduce: DDP bucket 0");
  ASSERT_EQ(waits.size(), 1U);
  ASSERT_EQ(buckets.size(), 1U);
  EXPECT_EQ(waits[0].at("args").at("hook"), hooks::allreduce().name());
  EXPECT_EQ(buckets[0].at("args").at("parameters"), kTracedParameters);
}

TEST(TracedDdpStep, OptimizersInBackwardSayWhichParameterTheyStep) {
  const auto slices = slices_of([] {
    run_ranks(2, [](const Group& g) {
      DistributedDataParallel<TracedNet> ddp(make_traced_net(), {.process_group = g});
      optimizer_in_backward(ddp, [](std::vector<at::Tensor> parameters) {
        return std::make_unique<torch::optim::SGD>(parameters, torch::optim::SGDOptions(0.1));
      });
      traced_step(ddp);
    });
  });
  const auto steps = named(slices, 0, "step");
  ASSERT_EQ(int64_t(steps.size()), kTracedParameters);
  std::set<std::string> names;
  for (const json& step : steps) {
    EXPECT_EQ(step.at("cat"), "optimizer");
    names.insert(step.at("args").at("parameter").get<std::string>());
  }
  EXPECT_EQ(int64_t(names.size()), kTracedParameters);
}

TEST(TracedDdpStep, ReplaysOfACapturedStepHoldItsCollectives) {
  constexpr int kSteps = 6;
  const auto slices = slices_of([] {
    run_ranks(2, [](const Group& g) {
      torch::nn::Linear net = seeded(3, [] { return torch::nn::Linear(5, 3); });
      DistributedDataParallel ddp(net, {.process_group = g});
      auto step = capture([&](const at::Tensor& x) {
        ddp.zero_grad();
        ddp(x).sum().backward();
      });
      for (int i = 0; i < kSteps; ++i) step(torch::ones({4, 5}));
    });
  });
  const auto replays = named(slices, 0, "replay"), sums = named(slices, 0, "all_reduce");
  ASSERT_FALSE(replays.empty());
  EXPECT_EQ(replays[0].at("cat"), "replay");
  EXPECT_EQ(replays.size() + named(slices, 0, "backward").size(), size_t(kSteps));
  EXPECT_TRUE(std::any_of(sums.begin(), sums.end(), [&](const json& sum) {
    return begin_of(sum) >= begin_of(replays.back()) && end_of(sum) <= end_of(replays.back()) + 1e-3 &&
           sum.at("args").at("bytes") == (5 * 3 + 3) * 4;
  }));
}

TEST(TracedDdpStep, AStepOfZeroHoldsItsBroadcasts) {
  const auto slices = slices_of([] {
    run_ranks(2, [](const Group& g) {
      TracedNet net = make_traced_net();
      ZeroRedundancyOptimizer<torch::optim::SGD> optimizer(net->parameters(), torch::optim::SGDOptions(0.1),
                                                           {.process_group = g});
      net->forward(torch::ones({4, 5})).sum().backward();
      optimizer.step();
    });
  });
  const auto steps = named(slices, 0, "step"), sent = named(slices, 0, "broadcast: ZeRO's parameters");
  ASSERT_EQ(steps.size(), 1U);
  EXPECT_EQ(steps[0].at("cat"), "optimizer");
  ASSERT_FALSE(sent.empty());
  EXPECT_EQ(sum_of_notes(sent, "bytes"), kTracedElements * 4);
  for (const json& slice : sent) {
    EXPECT_GE(begin_of(slice), begin_of(steps[0]));
    EXPECT_LE(end_of(slice), end_of(steps[0]) + 1e-3);
  }
}

}  // namespace
}  // namespace serried
