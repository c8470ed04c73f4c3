// What the options and the small calls of DistributedDataParallel do, and what they refuse.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <sstream>

#include "serried/comm/collectives/collectives.h"
#include "serried/comm/groups/ranks.h"
#include "serried/parallel/ddp/ddp.h"
#include "serried/parallel/ddp/reducer.h"
#include "tests/support/close.h"
#include "tests/support/errors.h"

namespace serried {
namespace {

using testing::error_text;
using testing::expect_close;
using testing::expect_equal;
using ::testing::HasSubstr;

/// A weight, a head that a call may leave out, and a buffer.
struct OptionedImpl : torch::nn::Module {
  torch::nn::Linear body = register_module("body", torch::nn::Linear(3, 2));
  torch::nn::Linear head = register_module("head", torch::nn::Linear(3, 2));
  at::Tensor seen = register_buffer("seen", at::zeros({1}));

  at::Tensor forward(const at::Tensor& x, bool use_head = true) { return use_head ? body(x) + head(x) : body(x); }
};
TORCH_MODULE(Optioned);

Optioned optioned(int seed = 0) {
  return seeded(uint64_t(seed), [] { return Optioned(); });
}

/// One row, of this rank's number.
at::Tensor row_of(const Group& group) {
  return at::full({1, 3}, float(group->getRank() + 1));
}

/// The mean of all ranks' rows, which is the gradient of every weight.
at::Tensor mean_row(const Group& group) {
  return at::full({2, 3}, (group->getSize() + 1) / 2.0F);
}

template <class Fn>
std::string refused(Fn&& fn) {
  return error_text<c10::ValueError>(std::forward<Fn>(fn));
}

TEST(DdpOptions, TheCurrentGroupIsTheDefault) {
  run_ranks(2, [](const Group& group) {
    DistributedDataParallel ddp(optioned());
    EXPECT_EQ(ddp.process_group(), group);
    EXPECT_EQ(ddp.rank(), group->getRank());
    ddp(row_of(group)).sum().backward();
    expect_close(ddp.module()->body->weight.grad(), mean_row(group));
  });
}

TEST(DdpOptions, AGroupAndAMeshTogetherAreRefused) {
  run_ranks(2, [](const Group& group) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2}, {"dp"}, {.group = group});
    EXPECT_THAT(refused([&] { DistributedDataParallel ddp(optioned(), {.process_group = group, .mesh = mesh}); }),
                HasSubstr("both process_group and mesh are given\n  fix: pass one of them"));
  });
}

TEST(DdpOptions, AMeshHasOneAxis) {
  run_ranks(2, [](const Group& group) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2, 1}, {"dp", "tp"}, {.group = group});
    EXPECT_THAT(refused([&] { DistributedDataParallel ddp(optioned(), {.mesh = mesh}); }),
                HasSubstr("needs a mesh of one axis"));
    DistributedDataParallel ddp(optioned(), {.mesh = mesh["dp"]});
    ddp(row_of(group)).sum().backward();
    expect_close(ddp.module()->body->weight.grad(), mean_row(group));
  });
}

TEST(DdpOptions, AnEmptyModuleIsRefused) {
  run_ranks(1, [](const Group& group) {
    EXPECT_THAT(refused([&] {
                  std::shared_ptr<OptionedImpl> none;
                  DistributedDataParallel ddp(none, {.process_group = group});
                }),
                HasSubstr("the module is empty"));
  });
}

TEST(DdpOptions, StatisticsNeedAnInterval) {
  run_ranks(1, [](const Group& group) {
    EXPECT_THAT(refused([&] { DistributedDataParallel ddp(optioned(), {.process_group = group, .stats_every = 0}); }),
                HasSubstr("stats_every is 0\n  fix: pass the number of iterations between two samples, 1 or more"));
  });
}

TEST(DdpOptions, WithoutInitialSyncNothingIsSent) {
  run_ranks(2, [](const Group& group) {
    if (group->getRank() == 0) {
      DistributedDataParallel ddp(optioned(), {.process_group = group, .init_sync = false});  // the other has none
    }
    Optioned net = optioned(group->getRank());
    DistributedDataParallel ddp(net, {.process_group = group, .init_sync = false});
    expect_equal(net->body->weight.detach(), optioned(group->getRank())->body->weight.detach());
  });
}

TEST(DdpOptions, BuffersStayEachRanksOwnWhereAsked) {
  run_ranks(2, [](const Group& group) {
    for (const bool synced : {true, false}) {
      DistributedDataParallel ddp(optioned(), {.process_group = group, .sync_buffers = synced});
      ddp.module()->seen.fill_(group->getRank() + 1);
      EXPECT_EQ(ddp.will_sync_buffers(), synced);
      ddp(row_of(group));
      EXPECT_EQ(ddp.module()->seen.item<float>(), synced ? 1 : group->getRank() + 1);
    }
  });
}

TEST(DdpOptions, BuffersAreNotTakenAfterAnUnsynchronisedForward) {
  run_ranks(2, [](const Group& group) {
    DistributedDataParallel ddp(optioned(), {.process_group = group});
    {
      const auto guard = ddp.no_sync();
      ddp(row_of(group)).sum().backward();
    }
    EXPECT_FALSE(ddp.will_sync_buffers());
    ddp.module()->seen.fill_(group->getRank());
    ddp(row_of(group)).sum().backward();
    EXPECT_EQ(ddp.module()->seen.item<float>(), group->getRank());
    EXPECT_TRUE(ddp.will_sync_buffers());
    ddp(row_of(group));
    EXPECT_EQ(ddp.module()->seen.item<float>(), 0);
  });
}

TEST(DdpOptions, ABufferThatWasReplacedIsSent) {
  run_ranks(2, [](const Group& group) {
    DistributedDataParallel ddp(optioned(), {.process_group = group});
    ddp.module()->seen.set_data(at::full({4}, float(group->getRank() + 5)));
    ddp(row_of(group));
    expect_equal(ddp.module()->seen, at::full({4}, 5.0F));
  });
}

TEST(DdpOptions, ABufferHookReplacesTheBroadcast) {
  run_ranks(2, [](const Group& group) {
    for (const auto location : {BufferHookLocation::pre_forward, BufferHookLocation::post_forward}) {
      DistributedDataParallel ddp(optioned(), {.process_group = group});
      EXPECT_THAT(refused([&] { ddp.register_buffer_hook(nullptr); }), HasSubstr("the hook is empty"));
      const auto add_up = [](const Group& ranks, const std::map<std::string, at::Tensor>& buffers) {
        std::vector<at::Tensor> tensors = {buffers.at("seen")};
        return std::vector<HookFuture>{ranks->allreduce(tensors)->getFuture()};
      };
      ddp.register_buffer_hook(add_up, location);
      ddp.module()->seen.fill_(group->getRank() + 1);
      ddp(row_of(group)).sum().backward();
      EXPECT_EQ(ddp.module()->seen.item<float>(), 3);
    }
  });
}

std::string initial_sizes(const DistributedDataParallelOptions& options) {
  torch::nn::Sequential net;
  for (int i = 0; i < 4; ++i)
    net->push_back(torch::nn::Linear(torch::nn::LinearOptions(512, 512).bias(false)));  // 1 MiB
  DistributedDataParallel ddp(net, options);
  return ddp.logging_data().to_map().at("bucket_sizes").toStringRef();
}

TEST(DdpOptions, TheFirstBucketIsSmallUnlessACapIsGiven) {
  run_ranks(1, [](const Group& group) {
    // In the order of reduction, the last parameters first; one bucket where they will be rebuilt.
    EXPECT_EQ(initial_sizes({.process_group = group}), "4194304");
    EXPECT_EQ(initial_sizes({.process_group = group, .find_unused_parameters = true}), "3145728, 1048576");
    EXPECT_EQ(initial_sizes({.process_group = group, .bucket_cap_mb = 2, .find_unused_parameters = true}),
              "2097152, 2097152");
  });
}

TEST(DdpOptions, EachBucketMayHaveItsCap) {
  run_ranks(1, [](const Group& group) {
    EXPECT_EQ(initial_sizes({.process_group = group, .bucket_caps_mb = {2, 1}}), "1048576, 1048576, 2097152");
    EXPECT_THAT(refused([&] {
                  initial_sizes({.process_group = group, .bucket_caps_mb = {1, -1}});
                }),
                HasSubstr("a bucket of -1 MiB holds nothing"));
  });
}

TEST(DdpOptions, BucketsThatNobodyUsesMayBeLeftOut) {
  run_ranks(2, [](const Group& group) {
    Optioned net = optioned();
    DistributedDataParallel ddp(
        net,
        {.process_group = group, .bucket_cap_mb = 1e-6, .find_unused_parameters = true, .skip_unused_allreduce = true});
    for (int step = 0; step < 2; ++step) {
      ddp.zero_grad();
      ddp(row_of(group), /*use_head=*/false).sum().backward();
      expect_close(net->body->weight.grad(), mean_row(group));
      EXPECT_FALSE(net->head->weight.grad().defined());
    }
  });
}

TEST(DdpOptions, GradientsMayBeCopiedWhenTheBucketIsFull) {
  run_ranks(3, [](const Group& group) {
    for (const bool as_view : {true, false}) {
      Optioned net = optioned();
      DistributedDataParallel ddp(
          net, {.process_group = group, .gradient_as_bucket_view = as_view, .batched_grad_copy = true});
      for (int step = 0; step < 3; ++step) {
        ddp.zero_grad();
        ddp(row_of(group)).sum().backward();
        expect_close(net->body->weight.grad(), mean_row(group));
        expect_close(net->head->weight.grad(), mean_row(group));
      }
    }
  });
}

struct OneParameter : torch::nn::Module {
  explicit OneParameter(const at::Tensor& tensor) { register_parameter("table", tensor); }
  at::Tensor forward(const at::Tensor& x) { return x; }
};

TEST(DdpOptions, ParametersWithoutMemoryAndSparseOnesAreRefused) {
  run_ranks(1, [](const Group& group) {
    const auto wrap = [&](const at::Tensor& tensor) {
      DistributedDataParallel ddp(std::make_shared<OneParameter>(tensor), {.process_group = group});
    };
    EXPECT_THAT(refused([&] { wrap(at::empty({3}, at::kMeta)); }),
                HasSubstr("table is on the meta device, it has no memory yet"));
    EXPECT_THAT(refused([&] { wrap(at::eye(3).to_sparse()); }),
                HasSubstr("table is a sparse tensor\n  fix: make it dense, or name it in .ignore"));
  });
}

TEST(DdpOptions, GradientsLieInTheBucketWithTheStridesOfTheirParameter) {
  run_ranks(2, [](const Group& group) {
    torch::nn::Conv2d conv(torch::nn::Conv2dOptions(3, 4, 2));
    conv->to(at::kFloat);
    conv->weight.set_data(conv->weight.contiguous(at::MemoryFormat::ChannelsLast));
    DistributedDataParallel ddp(conv, {.process_group = group});
    for (int step = 0; step < 3; ++step) {
      ddp.zero_grad(/*set_to_none=*/step == 1);
      ddp(at::ones({1, 3, 4, 4})).sum().backward();
      EXPECT_EQ(conv->weight.grad().strides(), conv->weight.strides());
      const at::Tensor& flat = ddp.reducer().buckets().at(0).flat;
      EXPECT_EQ(conv->weight.grad().storage().data(), flat.storage().data());
    }
  });
}

TEST(DdpOptions, TrainAndEvalReachTheModule) {
  run_ranks(1, [](const Group& group) {
    DistributedDataParallel ddp(optioned(), {.process_group = group});
    ddp.eval();
    EXPECT_FALSE(ddp.module()->is_training());
    ddp.train();
    EXPECT_TRUE(ddp.module()->is_training());
  });
}

TEST(DdpOptions, TheModuleIsSavedWithoutTheWrapper) {
  run_ranks(1, [](const Group& group) {
    DistributedDataParallel ddp(optioned(1), {.process_group = group});
    std::stringstream file;
    torch::save(ddp.module(), file);
    Optioned loaded = optioned(2);
    torch::load(loaded, file);
    expect_equal(loaded->body->weight.detach(), ddp.module()->body->weight.detach());
  });
}

TEST(DdpOptions, IgnoredParametersAndBuffersAreLeftAlone) {
  run_ranks(2, [](const Group& group) {
    Optioned net = optioned(group->getRank());
    net->seen.fill_(group->getRank());
    DistributedDataParallel ddp(net, {.process_group = group, .ignore = {"head.weight", "seen"}});
    expect_equal(net->head->weight.detach(), optioned(group->getRank())->head->weight.detach());
    expect_equal(net->body->weight.detach(), optioned(0)->body->weight.detach());
    ddp(row_of(group)).sum().backward();
    expect_close(net->head->weight.grad(), row_of(group).expand({2, 3}));
    expect_close(net->body->weight.grad(), mean_row(group));
    EXPECT_EQ(net->seen.item<float>(), group->getRank());
  });
}

TEST(DdpOptions, WithoutItsHooksNothingIsReduced) {
  run_ranks(2, [](const Group& group) {
    Optioned net = optioned();
    DistributedDataParallel ddp(net, {.process_group = group});
    ddp.remove_hooks();
    ddp(row_of(group)).sum().backward();
    expect_close(net->body->weight.grad(), row_of(group).expand({2, 3}));
  });
}

TEST(DdpOptions, TheModuleOutlivesTheWrapper) {
  run_ranks(2, [](const Group& group) {
    Optioned net = optioned();
    {
      DistributedDataParallel ddp(net, {.process_group = group});
      ddp(row_of(group)).sum().backward();
    }
    expect_close(net->body->weight.grad(), mean_row(group));
    net->zero_grad();
    net(row_of(group)).sum().backward();
    expect_close(net->body->weight.grad(), row_of(group).expand({2, 3}));
  });
}

TEST(DdpOptions, TrainingGoesOnInAnotherGroup) {
  run_ranks(3, [](const Group& group) {
    Optioned net = optioned();
    DistributedDataParallel ddp(net, {.process_group = group});
    for (int step = 0; step < 2; ++step) ddp(row_of(group)).sum().backward();
    EXPECT_THAT(refused([&] { ddp.set_process_group(nullptr); }), HasSubstr("the group is null"));
    const Group pair = split_group(group, {{0, 2}});
    if (!pair) return;
    ddp.set_process_group(pair);
    EXPECT_EQ(ddp.process_group(), pair);
    for (int step = 0; step < 2; ++step) {
      ddp.zero_grad();
      ddp(row_of(group)).sum().backward();
      expect_close(net->body->weight.grad(), at::full({2, 3}, 2.0F));  // of rows 1 and 3
    }
  });
}

TEST(DdpOptions, AStaticGraphIsDeclaredBeforeTheFirstIteration) {
  run_ranks(2, [](const Group& group) {
    Optioned net = optioned();
    DistributedDataParallel ddp(net, {.process_group = group});
    ddp.set_static_graph();
    ddp.set_static_graph();  // a warning
    for (int step = 0; step < 3; ++step) {
      ddp.zero_grad();
      ddp(row_of(group), /*use_head=*/false).sum().backward();
      expect_close(net->body->weight.grad(), mean_row(group));
      EXPECT_FALSE(net->head->weight.grad().defined());
    }
    DistributedDataParallel late(optioned(), {.process_group = group});
    late(row_of(group)).sum().backward();
    EXPECT_THAT(refused([&] { late.set_static_graph(); }),
                HasSubstr("called after 1 iterations\n  fix: call it before the first forward"));
  });
}

TEST(DdpOptions, ASecondGradientAfterTheFirstWasSentNamesTheParameter) {
  run_ranks(1, [](const Group& group) {
    Optioned net = optioned();
    DistributedDataParallel ddp(net, {.process_group = group});
    const at::Tensor x = at::ones({1, 3}).requires_grad_(true);
    const at::Tensor y = ddp(x * 2);
    // When this backward has reached all weights, another one over a graph of its own reaches them again.
    x.register_hook([&](const at::Tensor&) {
      at::AutoGradMode with_gradients(true);
      net(at::ones({1, 3})).sum().backward();
    });
    EXPECT_THAT(refused([&] { y.sum().backward(); }), HasSubstr("received a second gradient in one backward"));
  });
}

}  // namespace
}  // namespace serried
