// What fully_shard sends and holds, counted.
#include <gtest/gtest.h>

#include "serried/optim/adam.h"
#include "serried/tensor/debug/comm_debug.h"
#include "tests/parallel/fsdp/sharded_models.h"
#include "tests/support/close.h"

namespace serried::testing {
namespace {

using namespace sharded;

constexpr int kDepth = 4;  // layers, each a block; and one block around them

NetPtr deep_gpt() {
  return make([] { return std::make_shared<Gpt>(kDepth); });
}

TEST(FullyShardCounts, AStepGathersTwicePerBlockLessTheLastAndTheRootAndReducesOnce) {
  for (int world : {2, 4}) {
    run_ranks(world, [](const Group&) {
      const NetPtr net = deep_gpt();
      const FullyShardHandle handle = shard_all(*net);
      const auto optimizer = adamw(net->parameters());
      for (int step = 0; step < 3; ++step) {
        CommDebugMode comm;
        optimizer->zero_grad();
        net->loss(step).backward();
        optimizer->step();
        EXPECT_EQ(comm.count("all_gather"), 2 * (kDepth + 1) - 2);
        EXPECT_EQ(comm.count("reduce_scatter"), kDepth + 1);
        EXPECT_EQ(comm.count(), 2 * (kDepth + 1) - 2 + kDepth + 1);
      }
      EXPECT_EQ(handle.usage().num_reductions, 3 * (kDepth + 1));
    });
  }
}

TEST(FullyShardCounts, BlocksThatStayAreGatheredOnce) {
  run_ranks(2, [](const Group&) {
    const NetPtr net = deep_gpt();
    const FullyShardHandle handle = shard_all(*net, {.reshard_after_forward = false});
    CommDebugMode comm;
    net->loss(1).backward();
    EXPECT_EQ(comm.count("all_gather"), kDepth + 1);
    EXPECT_EQ(handle.usage().gathered_bytes, 0);
    handle.set_reshard_after_backward(false);
    net->loss(1).backward();
    net->loss(2).backward();
    EXPECT_EQ(comm.count("all_gather"), 2 * (kDepth + 1));
    handle.set_reshard_after_backward(true);
    handle.set_reshard_after_forward(true);
    net->loss(2).backward();
    EXPECT_EQ(handle.usage().gathered_bytes, 0);
  });
}

TEST(FullyShardCounts, OneBlockForAllIsGatheredOnceAndReducedOnce) {
  run_ranks(2, [](const Group&) {
    const NetPtr net = deep_gpt();
    fully_shard(*net);
    CommDebugMode comm;
    net->loss(1).backward();
    EXPECT_EQ(comm.count("all_gather"), 1);
    EXPECT_EQ(comm.count("reduce_scatter"), 1);
  });
}

TEST(FullyShardCounts, AnOptimizerStepSendsNothing) {
  run_ranks(2, [](const Group&) {
    const NetPtr net = deep_gpt();
    shard_all(*net);
    const auto optimizer = adamw(net->parameters());
    net->loss(1).backward();
    CommDebugMode comm;
    optimizer->step();
    optimizer->zero_grad();
    EXPECT_EQ(comm.count(), 0);
  });
}

// One rank has the row, the others nothing.
TEST(FullyShardCounts, AnOptimizerStepOfOneRowSendsNothing) {
  for (const int world : {2, 3}) {
    run_ranks(world, [](const Group&) {
      torch::nn::Linear plain = seeded(5, [] { return torch::nn::Linear(8, 1); });
      torch::nn::Linear layer = seeded(5, [] { return torch::nn::Linear(8, 1); });
      fully_shard(*layer);
      const MakeOptimizer makers[] = {
          adamw,
          [](std::vector<at::Tensor> p) {
            return std::make_unique<torch::optim::SGD>(std::move(p), torch::optim::SGDOptions(0.1).momentum(0.9));
          },
          [](std::vector<at::Tensor> p) {
            return std::make_unique<serried::AdamW>(std::move(p), torch::optim::AdamWOptions(0.1));
          }};
      for (const MakeOptimizer& make : makers) {
        const auto a = make(layer->parameters()), b = make(plain->parameters());
        for (int step = 0; step < 2; ++step) {
          a->zero_grad();
          b->zero_grad();
          const at::Tensor x = torch::ones({3, 8}) * (step + 1);
          layer(x).square().sum().backward();
          plain(x).square().sum().backward();
          CommDebugMode comm;
          a->step();
          EXPECT_EQ(comm.count(), 0);
          b->step();
        }
      }
      const std::vector<at::Tensor> values = values_of(*layer), wanted = values_of(*plain);
      for (size_t i = 0; i < wanted.size(); ++i) EXPECT_TRUE(at::allclose(values[i], wanted[i], 1e-5, 1e-6)) << i;
    });
  }
}

TEST(FullyShardCounts, TwoBlocksAndTheRootAreWholeAtMostAndTwoBlocksOfGradients) {
  run_ranks(2, [](const Group&) {
    const NetPtr net = deep_gpt();
    int64_t largest = 0;
    for (const auto& layer : net->layers()) largest = std::max(largest, fully_shard(*layer).whole_bytes());
    const FullyShardHandle handle = fully_shard(*net);
    const auto optimizer = adamw(net->parameters());
    net->loss(0).backward();
    handle.usage();
    for (int step = 0; step < 2; ++step) {
      optimizer->zero_grad();
      net->loss(step).backward();
      optimizer->step();
      const FullyShardUsage usage = handle.usage();
      // A second one where the next block comes ahead (overlap_test.cpp has the exact numbers). Parts are aligned.
      const int64_t slack = 2 * 16 * 256;
      EXPECT_GT(usage.peak_gathered_bytes, largest);
      EXPECT_LE(usage.peak_gathered_bytes, 2 * largest + handle.whole_bytes() + slack);
      EXPECT_LE(usage.peak_gradient_bytes, 2 * std::max(largest, handle.whole_bytes()) + slack);
      EXPECT_EQ(usage.gathered_bytes, 0);
      EXPECT_EQ(usage.gradient_bytes, 0);
    }
  });
}

TEST(FullyShardCounts, UnshardByHandGathersBeforehandAndReshardLetsGo) {
  run_ranks(2, [](const Group&) {
    const NetPtr net = deep_gpt();
    std::vector<FullyShardHandle> handles;
    for (const auto& layer : net->layers()) handles.push_back(fully_shard(*layer));
    handles.push_back(fully_shard(*net));
    handles[0].set_modules_to_forward_prefetch({handles[1]});
    handles[1].set_modules_to_backward_prefetch({handles[0]});
    for (const FullyShardHandle& handle : handles) handle.unshard();
    CommDebugMode comm;
    net->loss(1).backward();
    EXPECT_EQ(comm.count("all_gather"), 0);
    for (const FullyShardHandle& handle : handles) handle.reshard();
    EXPECT_EQ(handles[0].usage().gathered_bytes, 0);
    net->loss(1).backward();
    EXPECT_EQ(comm.count("all_gather"), 2 * (kDepth + 1) - 2);
  });
}

TEST(FullyShardCounts, ModulesThatAreGoneLeaveNoMemoryBehind) {
  run_ranks(2, [](const Group& group) {
    c10::weak_intrusive_ptr<c10::TensorImpl> parameter{c10::intrusive_ptr<c10::TensorImpl>()};
    const size_t owners = group.use_count();
    {
      const NetPtr net = deep_gpt();
      shard_all(*net);
      net->loss(1).backward();
      net->loss(1);
      parameter = c10::weak_intrusive_ptr<c10::TensorImpl>(net->parameters()[0].getIntrusivePtr());
    }
    EXPECT_TRUE(parameter.expired());
    parameter.reset();  // who watches a DTensor keeps what it is
    EXPECT_EQ(group.use_count(), owners) << "blocks are gone, with all they had of the group";
  });
}

}  // namespace
}  // namespace serried::testing
