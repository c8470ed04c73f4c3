// Dead nodes and second names go; what has an effect stays.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tests/graph/passes/recorded.h"

namespace serried {
namespace {

using namespace serried::testing;

Tensors much_ado(const Tensors& in) {
  const at::Tensor y = in[0] * in[1];
  y.exp();
  return {y.detach().add(y.t().t())};
}

TEST(DropDead, LeavesWhatTheResultNeeds) {
  const Tensors in{torch::randn({3, 2}), torch::randn({3, 2})};
  const Recorded before = record(much_ado, in);
  EXPECT_EQ(code_of(before),
            "%2 = mul(%in0, %in1)  # f32[3, 2]\n"
            "%3 = exp(%2)  # f32[3, 2]\n"
            "%4 = detach(%2)  # f32[3, 2]\n"
            "%5 = t(%2)  # f32[2, 3]\n"
            "%6 = t(%5)  # f32[3, 2]\n"
            "%7 = add(%4, %6)  # f32[3, 2]\n");
  const Recorded after = with(before, {passes::drop_dead()});
  EXPECT_EQ(code_of(after),
            "%2 = mul(%in0, %in1)  # f32[3, 2]\n"
            "%7 = add(%2, %2)  # f32[3, 2]\n");
  expect_same_results(much_ado, after, in);
}

TEST(DropDead, KeepsRandomNumbersThatNobodyReads) {
  const Function fn = [](const Tensors& in) -> Tensors {
    torch::rand({2});
    return {in[0] * torch::rand({3})};
  };
  const Tensors in{torch::ones({3})};
  const Recorded after = with(record(fn, in), {passes::drop_dead()});
  torch::manual_seed(3);
  const Tensors expected = fn(in);
  graph::Program program(after.graph, after.groups);
  torch::manual_seed(3);
  expect_equal(rerun(program, after, in)[0], expected[0]);
}

TEST(DropDead, KeepsWritesThroughViews) {
  const Function fn = [](const Tensors& in) -> Tensors {
    at::Tensor y = in[0] + 1;
    y.detach().t().select(0, 1).mul_(3);
    return {y};
  };
  const Tensors in{torch::randn({3, 2})};
  expect_same_results(fn, with(record(fn, in), {passes::drop_dead()}), in);
}

TEST(DropDead, KeepsRunningStatistics) {
  at::Tensor mean = torch::zeros({2}), var = torch::ones({2});
  const Function fn = [&](const Tensors& in) -> Tensors {
    torch::batch_norm(in[0], {}, {}, mean, var, true, 0.1, 1e-5, false);
    return {mean + 0};
  };
  const Tensors in{torch::randn({5, 2})};
  const Recorded after = with(record(fn, in), {passes::drop_dead()});
  mean.zero_();
  graph::Program program(after.graph, after.groups);
  const at::Tensor got = rerun(program, after, in)[0];
  mean.zero_();
  expect_equal(got, fn(in)[0]);
}

TEST(DropDead, ResultsAreNoSecondNames) {
  const Function fn = [](const Tensors& in) -> Tensors {
    const at::Tensor y = in[0] * 2;
    return {in[0].detach(), y, y.detach()};
  };
  const Tensors in{torch::randn({3})};
  const Recorded after = with(record(fn, in), {passes::drop_dead()});
  EXPECT_EQ(after.graph.count("detach"), 2);
  graph::Program program(after.graph, after.groups);
  const Tensors out = rerun(program, after, in);
  EXPECT_FALSE(out[0].is_same(in[0]));
  EXPECT_FALSE(out[1].is_same(out[2]));
}

TEST(DropDead, ATensorThatChangesItsShapeKeepsItsNames) {
  const Function fn = [](const Tensors& in) -> Tensors {
    at::Tensor y = in[0] * 2;
    const at::Tensor z = y.detach();
    y.unsqueeze_(0);
    return {z + 1, y + 1};
  };
  const Tensors in{torch::randn({3})};
  const Recorded after = with(record(fn, in), {passes::drop_dead()});
  EXPECT_EQ(after.graph.count("detach"), 1);
  expect_same_results(fn, after, in);
}

}  // namespace
}  // namespace serried
