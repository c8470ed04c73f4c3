// Ops write into fixed buffers, except where their results leave the graph.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>

#include "serried/graph/capture.h"
#include "tests/graph/passes/recorded.h"

namespace serried {
namespace {

using namespace serried::testing;

TEST(Freeze, WritesIntoBuffers) {
  const at::Tensor w = torch::randn({3, 4});
  const Function fn = [&](const Tensors& in) -> Tensors { return {torch::relu(in[0].mm(w)).mul(2).sum(0)}; };
  const Tensors in{torch::randn({2, 3})};
  const Recorded before = record(fn, in);
  EXPECT_EQ(code_of(before),
            "%2 = mm(%in0, %p1)  # f32[2, 4]\n"
            "%3 = relu(%2)  # f32[2, 4]\n"
            "%4 = mul(%3, other=2)  # f32[2, 4]\n"
            "%5 = sum(%4, dim=[0])  # f32[4]\n");
  const Recorded after = with(before, {passes::freeze(100)});
  EXPECT_EQ(code_of(after),
            "mm(%in0, %p1, out=%b2)\n"
            "clamp_min(%b2, min=0, out=%b3)\n"
            "mul(%b3, %c6, out=%b4)\n"
            "%5 = sum(%b4, dim=[0])  # f32[4]\n");
  expect_same_results(fn, after, in);
}

TEST(Freeze, KeepsTheMemoryOfARunWithinThatOfEager) {
  // Eager needs two results of 4 KiB at a time; memory for the first two that stays would be there beside the third.
  const Function fn = [](const Tensors& in) -> Tensors { return {in[0].exp().sin().cos()}; };
  const Tensors in{torch::randn({1024})};
  const auto arena_bytes = [&](double max_peak) {
    const Recorded frozen = with(record(fn, in), {passes::freeze(max_peak), passes::plan_memory()});
    expect_same_results(fn, frozen, in);
    return frozen.graph.arena_bytes();
  };
  EXPECT_EQ(arena_bytes(1), 0);
  EXPECT_EQ(arena_bytes(100), 2 * 4096);
}

TEST(Freeze, ALimitBelowEagerIsAnError) {
  EXPECT_THROW(passes::freeze(0.5), c10::ValueError);
}

TEST(Freeze, ResultsAreNewTensorsAtEachRun) {
  const Function fn = [](const Tensors& in) -> Tensors {
    const at::Tensor y = in[0].mm(in[0]);
    return {y.t(), y.exp()};
  };
  const Tensors in{torch::randn({3, 3})};
  const Recorded after = with(record(fn, in), passes::defaults());
  EXPECT_EQ(after.graph.arena_bytes(), 0);
  graph::Program program(after.graph, after.groups);
  const Tensors first = rerun(program, after, in), second = rerun(program, after, in);
  for (size_t i = 0; i < first.size(); ++i) EXPECT_NE(first[i].data_ptr(), second[i].data_ptr());
}

TEST(Freeze, ReluTreatsSpecialNumbersAsEagerDoes) {
  const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  const Function fn = [](const Tensors& in) -> Tensors { return {torch::relu(in[0]).view(torch::kInt32) + 0}; };
  const at::Tensor x = torch::tensor({nan, -0.F, 0.F, inf, -inf, -1.F, 1.F, nan, -0.F}).repeat({5});
  const Recorded after = with(record(fn, {x}), {passes::freeze(100)});
  EXPECT_EQ(after.graph.count("clamp_min"), 1);
  graph::Program program(after.graph, after.groups);
  expect_equal(rerun(program, after, {x})[0], fn({x})[0]);
}

TEST(Freeze, LossesAndNormsComputeTheSame) {
  const at::Tensor labels = torch::tensor({1, 0, 3}), mean = torch::zeros({4}), var = torch::ones({4});
  const Function fn = [&](const Tensors& in) -> Tensors {
    namespace f = torch::nn::functional;
    const at::Tensor x = torch::layer_norm(in[0], {4});
    const at::Tensor y = torch::batch_norm(x, {}, {}, mean, var, false, 0.1, 1e-5, false);
    return {f::cross_entropy(y, labels) + torch::mse_loss(x, y) + torch::binary_cross_entropy(y.sigmoid(), x.sigmoid()),
            torch::gelu(y).softmax(1).matmul(y.t()) + torch::smooth_l1_loss(x, y), std::get<0>(y.max(1)) + 1};
  };
  const Tensors in{torch::randn({3, 4})};
  const Recorded after = with(record(fn, in), {passes::drop_dead(), passes::freeze(100), passes::hoist_views()});
  EXPECT_GT(after.graph.arena_bytes(), 0);
  expect_same_results(fn, after, in);
}

TEST(Freeze, WritesInPlaceOnBuffersAsOnTensors) {
  const Function fn = [](const Tensors& in) -> Tensors {
    at::Tensor y = in[0].exp();
    y.select(0, 1).add_(in[0].select(0, 0));
    return {y * 2};
  };
  const Tensors in{torch::randn({3, 2})};
  expect_same_results(fn, with(record(fn, in), passes::defaults()), in);
}

TEST(Freeze, WhatAHookKeepsStaysAsItWas) {
  const at::Tensor w = torch::ones({3}).requires_grad_();
  Tensors kept;
  auto step = capture([&](const at::Tensor& x) {
    const at::Tensor y = x * w;
    y.register_hook([&](const at::Tensor& grad) { kept.push_back(grad); });
    w.mutable_grad().reset();
    y.exp().sum().backward();
  });
  for (int i = 0; i < 6; ++i) step(torch::full({3}, 0.1 * i));
  EXPECT_EQ(step.replays(), 3);
  ASSERT_EQ(kept.size(), 6u);
  for (int i = 0; i < 6; ++i) expect_equal(kept[i], torch::full({3}, 0.1 * i).exp());
}

}  // namespace
}  // namespace serried
