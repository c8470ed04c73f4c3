// Training for many steps keeps no tensor that the steps made.
#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "serried/tensor/dispatch/dispatch.h"
#include "serried/tensor/making/modules.h"
#include "tests/support/on_mesh.h"

namespace serried {
namespace {

using testing::on_mesh;

// Counts this thread's tensor memory blocks that are alive.
struct LiveBlocks : c10::MemoryReportingInfoBase {
  void reportMemoryUsage(void*, int64_t size, size_t, size_t, c10::Device) override { blocks += size > 0 ? 1 : -1; }
  bool memoryProfilingEnabled() const override { return true; }
  int64_t blocks = 0;
};

TEST(Leak, LiveTensorsStayConstantOverManySteps) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    auto live = std::make_shared<LiveBlocks>();
    const c10::DebugInfoGuard counting(c10::DebugInfoKind::PROFILER_STATE, live);
    torch::nn::Linear net = seeded(1, [] { return torch::nn::Linear(5, 7); });
    distribute_parameter(net->weight, mesh, {Shard(0)});
    distribute_parameter(net->bias, mesh, {Shard(0)});
    torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(0.01));
    const at::Tensor x = seeded(2, [] { return at::randn({4, 5}); });
    const auto step = [&] {
      optimizer.zero_grad();
      DTensor out(net(distribute_tensor(x, mesh, {Replicate()})));
      out.redistribute({Replicate()}).pow(2).mean().backward();
      optimizer.step();
    };
    for (int i = 0; i < 5; ++i) step();
    const int64_t before = live->blocks;
    reset_dispatch_stats();
    for (int i = 0; i < 10'000; ++i) step();
    EXPECT_EQ(live->blocks, before);
    EXPECT_GT(before, 0);
    EXPECT_EQ(dispatch_stats().misses, 0) << "the optimizer's numbers change every step, the plans must not";
  });
}

TEST(Leak, ChangingShapesKeepNoTensors) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    auto live = std::make_shared<LiveBlocks>();
    const c10::DebugInfoGuard counting(c10::DebugInfoKind::PROFILER_STATE, live);
    const auto step = [&](int64_t size) {
      const at::Tensor d = distribute_tensor(at::ones({size, 3}), mesh, {Shard(0)}).requires_grad_();
      (d * 2).t().mm(d).sum().backward();
    };
    step(1);
    const int64_t before = live->blocks;
    for (int64_t size = 1; size < 500; ++size) step(size);
    EXPECT_EQ(live->blocks, before);
  });
}

}  // namespace
}  // namespace serried
