// Variables of the surroundings that get another tensor, module or parameter while the old one lives: seen if listed.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "serried/graph/capture.h"
#include "serried/optim/sgd.h"
#include "tests/support/errors.h"

namespace serried {
namespace {

using testing::error_text;
using ::testing::HasSubstr;

at::Tensor batch_of(int call) {
  return torch::full({2, 3}, 0.1f * float(call + 1));
}

TEST(CaptureHandles, AWatchedTensorMayBeSwapped) {
  const at::NoGradGuard no_grad;
  torch::nn::Linear net(3, 2);
  at::Tensor average = torch::ones({2, 3});
  auto step = capture([&](const at::Tensor& x) { return net(x); }, {.watch = {{"weight", net->weight}}});
  for (int i = 0; i < 16; ++i) {
    if (i == 5 || i == 11) std::swap(net->weight, average);
    EXPECT_TRUE(at::equal(step(batch_of(i)), net(batch_of(i)))) << i;
  }
  EXPECT_EQ(step.captures(), 2);
  EXPECT_THAT(step.last_recapture_reason(), HasSubstr("weight was f32[2, 3] at "));
}

TEST(CaptureHandles, WatchedModulesMayBeSwapped) {
  const at::NoGradGuard no_grad;
  torch::nn::Linear net(3, 2), other(3, 2);
  std::shared_ptr<torch::nn::Module> pointer = net.ptr();
  auto step = capture([&](const at::Tensor& x) { return net(x); }, {.watch = {{"net", net}, {"pointer", pointer}}});
  for (int i = 0; i < 12; ++i) {
    if (i == 5) std::swap(net, other);
    EXPECT_TRUE(at::equal(step(batch_of(i)), net(batch_of(i)))) << i;
  }
  EXPECT_EQ(step.captures(), 2);
}

struct TrainedNets {
  TrainedNets() : optimizer(first->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9)) {
    const at::NoGradGuard no_grad;
    for (at::Tensor& p : parameters()) p.fill_(0.5);
  }
  std::vector<at::Tensor> parameters() const { return {first->weight, first->bias, second->weight, second->bias}; }
  at::Tensor train(const at::Tensor& x) {
    first->zero_grad();
    second->zero_grad();
    at::Tensor loss = second(first(x)).square().sum();
    loss.backward();
    optimizer.step();
    return loss;
  }

  torch::nn::Linear first{3, 3}, second{3, 2};
  torch::optim::SGD optimizer;
};

TEST(CaptureHandles, GroupsAndOptionsOfAListedOptimizerCount) {
  TrainedNets captured, eager;
  auto step = capture([&](const at::Tensor& x) { return captured.train(x); }, {.optimizers = {&captured.optimizer}});
  for (int i = 0; i < 24; ++i) {
    for (TrainedNets* nets : {&captured, &eager}) {
      auto& groups = nets->optimizer.param_groups();
      if (i == 5) nets->optimizer.add_param_group(torch::optim::OptimizerParamGroup(nets->second->parameters()));
      if (i == 10) groups[0].options().set_lr(0.01);
      if (i == 15) groups.pop_back();
    }
    EXPECT_TRUE(at::equal(step(batch_of(i)), eager.train(batch_of(i)))) << i;
    const auto actual = captured.parameters(), expected = eager.parameters();
    for (size_t k = 0; k < expected.size(); ++k) EXPECT_TRUE(at::equal(actual[k], expected[k])) << i << " " << k;
  }
  EXPECT_EQ(step.captures(), 4);
  EXPECT_THAT(step.last_recapture_reason(), HasSubstr("parameters and options of optimizers[0] was fingerprint"));
}

TEST(CaptureHandles, GroupsOfAnOptimizerThatIsNotListedCountToo) {
  TrainedNets captured, eager;
  auto step = capture([&](const at::Tensor& x) { return captured.train(x); });
  at::Tensor loss;
  for (int i = 0; i < 24; ++i) {
    for (TrainedNets* nets : {&captured, &eager}) {
      if (i == 6) nets->optimizer.add_param_group(torch::optim::OptimizerParamGroup(nets->second->parameters()));
      if (i == 12) nets->optimizer.param_groups().pop_back();
      if (i == 18) nets->optimizer.param_groups()[0].params().pop_back();
    }
    loss = step(batch_of(i % 3));
    EXPECT_TRUE(at::equal(loss, eager.train(batch_of(i % 3)))) << i;
    const auto actual = captured.parameters(), expected = eager.parameters();
    for (size_t k = 0; k < expected.size(); ++k) EXPECT_TRUE(at::equal(actual[k], expected[k])) << i << " " << k;
    if (i == 6) EXPECT_EQ(step.last_recapture_reason(), "the tensor f32[2, 3] had 2 handles and has 3");
  }
  EXPECT_EQ(step.captures(), 3);
  EXPECT_GE(step.replays(), 10);
}

// As when a copy of a module is made for a while: nothing that the function does changes.
TEST(CaptureHandles, TakenAndDroppedForNothingCostOneRecording) {
  TrainedNets nets;
  auto step = capture([&](const at::Tensor& x) { return nets.train(x); });
  for (int i = 0; i < 5; ++i) step(batch_of(i));
  const int64_t before = step.replays();
  for (int i = 0; i < 10; ++i) {
    const std::vector<at::Tensor> taken = i % 2 == 0 ? nets.parameters() : std::vector<at::Tensor>();
    step(batch_of(i));
  }
  EXPECT_EQ(step.captures(), 1);
  EXPECT_EQ(step.replays() - before, 9);
}

TEST(CaptureHandles, MembersOfListedModulesMayBeSwapped) {
  const at::NoGradGuard no_grad;
  torch::nn::Linear net(3, 2);
  at::Tensor average = torch::ones({2, 3});
  auto step = capture([&](const at::Tensor& x) { return net(x); }, {.modules = {net.ptr()}});
  for (int i = 0; i < 16; ++i) {
    if (i == 5 || i == 11) std::swap(net->weight, average);
    EXPECT_TRUE(at::equal(step(batch_of(i)), net(batch_of(i)))) << i;
  }
  EXPECT_EQ(step.captures(), 2);
}

// However often handles were taken for nothing.
TEST(CaptureHandles, AreCountedForEver) {
  at::Tensor scale = torch::ones({3});
  std::vector<at::Tensor> kept;
  auto step = capture([&](const at::Tensor& x) { return x * scale; });
  for (int i = 0; i < 60; ++i) {
    if (i % 2 == 0 && i < 40) kept.push_back(scale);
    if (i == 50) kept.resize(12);
    if (i == 52) scale = torch::full({3}, 5.f);
    EXPECT_TRUE(at::equal(step(batch_of(i)), batch_of(i) * scale)) << i;
  }
  EXPECT_GE(step.replays(), 20);
}

// The number of handles stays: only a watched variable shows it.
TEST(CaptureHandles, AWatchedVariableMayMoveOnWhileTheOldTensorIsKept) {
  at::Tensor scale = torch::ones({3});
  std::vector<at::Tensor> best;
  auto step = capture([&](const at::Tensor& x) { return x * scale; }, {.watch = {{"scale", scale}}});
  for (int i = 0; i < 16; ++i) {
    if (i == 5 || i == 10) {
      best.push_back(scale);
      scale = torch::full({3}, float(i));
    }
    EXPECT_TRUE(at::equal(step(batch_of(i)), batch_of(i) * scale)) << i;
  }
  EXPECT_EQ(step.captures(), 3);
}

// What the surroundings keep in two variables, one of which moves on.
TEST(CaptureHandles, AVariableThatMovesOnIsSeen) {
  const at::NoGradGuard no_grad;
  const std::vector<at::Tensor> scales = {torch::full({3}, 1.f), torch::full({3}, 2.f), torch::full({3}, 4.f)};
  at::Tensor scale = scales[0];
  auto step = capture([&](const at::Tensor& x) { return x * scale; });
  for (int i = 0; i < 15; ++i) {
    scale = scales[size_t(i / 5)];
    EXPECT_TRUE(at::equal(step(batch_of(i)), batch_of(i) * scale)) << i;
  }
}

TEST(CaptureHandles, AnOptimizerThatIsNoneIsAnError) {
  const auto make = [] { capture([](const at::Tensor& x) { return x; }, {.optimizers = {nullptr}}); };
  EXPECT_EQ(error_text<c10::ValueError>(make), "[capture] optimizers[0] is null\n  fix: list optimizers that exist");
}

}  // namespace
}  // namespace serried
