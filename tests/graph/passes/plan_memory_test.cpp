// Buffers share memory when they are never needed together.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tests/graph/passes/recorded.h"

namespace serried {
namespace {

using namespace serried::testing;

Tensors chain(const Tensors& in) {
  at::Tensor y = in[0].exp();
  for (int i = 0; i < 6; ++i) y = y.sin();
  return {y + 1};
}

TEST(PlanMemory, AChainNeedsTwoBuffers) {
  const Tensors in{torch::randn({64, 1024})};  // 256 KiB each
  const Recorded frozen = with(record(chain, in), {passes::freeze(100)});
  EXPECT_EQ(passes::memory_report(frozen.graph), "7 buffers: 1.750 MiB planned, 1.750 MiB without reuse");
  const Recorded planned = with(frozen, {passes::plan_memory()});
  EXPECT_EQ(passes::memory_report(planned.graph), "7 buffers: 0.500 MiB planned, 1.750 MiB without reuse");
  expect_same_results(chain, planned, in);
}

TEST(PlanMemory, ABufferLivesAsLongAsItsViews) {
  const Function fn = [](const Tensors& in) -> Tensors {
    const at::Tensor first_row = in[0].exp().t().select(0, 0);
    at::Tensor y = in[0].sin();
    for (int i = 0; i < 4; ++i) y = y.cos();
    return {y.select(1, 0) + first_row};
  };
  const Tensors in{torch::randn({5, 3})};
  expect_same_results(fn, with(record(fn, in), passes::defaults()), in);
  expect_same_results(fn, with(record(fn, in), {passes::freeze(100), passes::plan_memory()}), in);
}

TEST(PlanMemory, OddSizesStayAligned) {
  const Function fn = [](const Tensors& in) -> Tensors {
    return {in[0].exp().to(torch::kFloat64).sin().sum() + in[1].exp().select(0, 0), in[1].cos().sin() + 1};
  };
  const Tensors in{torch::randn({3}), torch::randn({17})};
  const Recorded planned = with(record(fn, in), {passes::freeze(100), passes::plan_memory()});
  int num_buffers = 0;
  for (const graph::Value& value : planned.graph.values()) {
    if (value.kind != graph::ValueKind::buffer) continue;
    EXPECT_EQ(value.arena_offset % 64, 0);
    ++num_buffers;
  }
  EXPECT_GE(num_buffers, 2);
  expect_same_results(fn, planned, in);
}

TEST(PlanMemory, PassesThatReorderPlanAgain) {
  const Function fn = [](const Tensors& in) -> Tensors {
    Tensors out;
    for (int i = 0; i < 4; ++i) {
      at::Tensor y = in[0].exp();
      y.mul_(3);
      out.push_back(y.sum());
    }
    return out;
  };
  const Tensors in{torch::randn({40})};
  expect_same_results(fn, with(record(fn, in), {passes::freeze(100), passes::plan_memory(), passes::fuse_foreach()}),
                      in);
}

}  // namespace
}  // namespace serried
