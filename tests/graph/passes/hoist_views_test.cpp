// Views of what stays in place are made once.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tests/graph/passes/recorded.h"

namespace serried {
namespace {

using namespace serried::testing;

TEST(HoistViews, MakesViewsOfParametersOnce) {
  const at::Tensor w = torch::randn({4, 6});
  const Function fn = [&](const Tensors& in) -> Tensors {
    const auto halves = w.t().split(3);
    const at::Tensor left = in[0].mm(halves[0]), right = in[0].mm(halves[1]);
    return {left + right};
  };
  const Tensors in{torch::randn({2, 3})};
  const Recorded before = record(fn, in);
  EXPECT_EQ(code_of(before),
            "%2 = t(%p1)  # f32[6, 4]\n"
            "%3, %4 = split(%2, split_size=3)  # f32[3, 4], f32[3, 4]\n"
            "%5 = mm(%in0, %3)  # f32[2, 4]\n"
            "%6 = mm(%in0, %4)  # f32[2, 4]\n"
            "%7 = add(%5, %6)  # f32[2, 4]\n");
  const Recorded after = with(before, {passes::hoist_views()});
  EXPECT_EQ(code_of(after),
            "%5 = mm(%in0, %p3)  # f32[2, 4]\n"
            "%6 = mm(%in0, %p4)  # f32[2, 4]\n"
            "%7 = add(%5, %6)  # f32[2, 4]\n");
  expect_same_results(fn, after, in);
  w.add_(1);
  expect_same_results(fn, after, in);
}

TEST(HoistViews, MakesViewsOfBuffersOnce) {
  const Function fn = [](const Tensors& in) -> Tensors { return {in[0].exp().t().select(0, 1) + 1}; };
  const Tensors in{torch::randn({3, 2})};
  const Recorded after = with(record(fn, in), {passes::freeze(), passes::hoist_views(), passes::plan_memory()});
  EXPECT_EQ(code_of(after),
            "exp(%in0, out=%b1)\n"
            "%4 = add(%b3, other=1)  # f32[3]\n");
  expect_same_results(fn, after, in);
}

TEST(HoistViews, LeavesAResultAlone) {
  const at::Tensor w = torch::randn({4, 3});
  const Function fn = [&](const Tensors& in) -> Tensors { return {w.t(), in[0] + 1}; };
  const Tensors in{torch::randn({2})};
  const Recorded after = with(record(fn, in), {passes::hoist_views()});
  EXPECT_EQ(after.graph.count("t"), 1);
  expect_same_results(fn, after, in);
}

TEST(HoistViews, LeavesWhatChangesItsShapeAlone) {
  at::Tensor w = torch::randn({3});
  const Function fn = [&](const Tensors& in) -> Tensors {
    w.unsqueeze_(0);
    const at::Tensor y = in[0] * w.select(0, 0);
    w.squeeze_(0);
    return {y};
  };
  const Tensors in{torch::randn({3})};
  EXPECT_EQ(with(record(fn, in), {passes::hoist_views()}).graph.count("select"), 1);
}

}  // namespace
}  // namespace serried
